"""An engine that fails, a hand-over that ends badly, or not at all, and callers that leave."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.engine.hosting.testing import Run
from pdserve.engine.port import Finish, Output
from pdserve.kvd.client.messages import Outcome
from pdserve.prefill import session
from pdserve.prefill.session import PrefillConfig
from pdserve.rpc import errors
from tests.unit.prefill.world import World, ready
from tests.unit.served import TID, refused


async def test_the_engine_refusing_ends_the_request(world: World) -> None:
    """With its own error; decode is told that the producer failed."""
    call = world.ask()
    (await world.engine.next_run()).fail(errors.PoolExceeded("too many blocks"))
    assert isinstance(await refused(call), errors.PoolExceeded)
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "PRODUCER_FAILED")]


async def test_an_engine_that_offers_nothing_has_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket for blocks that nobody holds is never signed."""
    monkeypatch.setattr(session, "LATE_CAUSE", 0.0)
    call = world.ask()
    (await world.engine.next_run()).say(Output(token_ids=(65,), finish=Finish.LENGTH))
    assert isinstance(await refused(call), errors.ProducerFailed)
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "PRODUCER_FAILED")]


async def test_an_engine_that_offers_nothing_since_kvd_has_gone(world: World) -> None:
    """The engine has heard of it first: the request ends with what kvd's end says, and the engine is not blamed."""
    call = world.ask()
    run = await world.engine.next_run()
    run.say(Output(token_ids=(65,), finish=Finish.LENGTH))
    await run.ended.wait()
    world.handoffs.end(TID, None, Outcome.FAILED, "KVD_UNAVAILABLE")
    assert isinstance(await refused(call), errors.KvdUnavailable)


async def test_no_kvd_no_prefill(world: World) -> None:
    """Refused before the engine computes for nobody."""
    world.handoffs.away = True
    assert isinstance(await refused(world.ask()), errors.KvdUnavailable)
    assert world.engine.runs == []


ENDS = [
    (Outcome.CANCELLED, "CONSUMER_FAILED", errors.ConsumerFailed),
    (Outcome.CANCELLED, "CANCELLED", errors.RequestCancelled),
    (Outcome.CANCELLED, "TIE_BROKEN", errors.TieBroken),
    (Outcome.EXPIRED, "TRANSFER_EXPIRED", errors.TransferExpired),
    (Outcome.FAILED, "PEER_LOST", errors.PeerLost),
    (Outcome.FAILED, "KVD_UNAVAILABLE", errors.KvdUnavailable),
    (Outcome.FAILED, "", errors.TransferFailed),
]


@pytest.mark.parametrize(("outcome", "reason", "kind"), ENDS)
@pytest.mark.parametrize("when", ["computing", "offered"])
async def test_a_bad_end_is_the_request_s_error(
    world: World, when: str, outcome: Outcome, reason: str, kind: type[errors.PdserveError]
) -> None:
    """As the class of kvd's reason; an engine that still computes is aborted. Nothing is cancelled twice; that kvd was
    lost is no end there."""
    call = world.ask()
    if when == "computing":
        run = await world.engine.next_run()
    else:
        run, _ = await ready(world, call)
    world.handoffs.end(TID, None, outcome, reason)
    assert type(await refused(call)) is kind
    await world.idle()
    assert run.aborted.is_set() == (when == "computing")
    lost = kind is errors.KvdUnavailable
    assert world.handoffs.cancelled == ([(TID, errors.ProducerFailed.reason)] if lost else [])


async def computing(world: World, call: Any) -> Run:
    """Until the engine has the request."""
    return await world.engine.next_run()


async def offered(world: World, call: Any) -> Run:
    """Until the offer is out."""
    return (await ready(world, call))[0]


@pytest.mark.parametrize("reach", [computing, offered])
@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
async def test_leaving_gives_the_transfer_up(world: World, reach: Callable[..., Any], how: str) -> None:
    """However the caller goes, in whichever phase: cancelled at kvd, aborted at the engine."""
    call = world.ask(timeout=1.0 if how == "deadline" else 20)
    run: Run = await reach(world, call)
    if how == "cancel":
        call.cancel()
    elif how == "channel":
        await world.channel.close()
    await asyncio.wait_for(world.handoffs.cancelled_once.wait(), 5)
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "CANCELLED")]
    assert run.aborted.is_set() == (reach is computing)


@pytest.mark.parametrize("world", [PrefillConfig(compute_seconds=0.05)], indirect=True)
async def test_a_stuck_engine_ends_the_request(world: World) -> None:
    """The wait for the engine has a deadline."""
    call = world.ask()
    run = await world.engine.next_run()
    assert isinstance(await refused(call), errors.DeadlinePassed)
    await world.idle()
    assert run.aborted.is_set()
    assert world.handoffs.cancelled == [(TID, "PRODUCER_FAILED")]


@pytest.mark.parametrize("world", [PrefillConfig(release_seconds=0.05)], indirect=True)
async def test_a_silent_kvd_ends_the_request(world: World) -> None:
    """The wait for the end has a deadline, too, and the transfer is given up."""
    call = world.ask()
    await ready(world, call)
    assert isinstance(await refused(call), errors.DeadlinePassed)
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "PRODUCER_FAILED")]
