"""A hand-over that ends badly, or not at all, and callers that leave: what the caller is told, and what is given up."""

import asyncio

import pytest
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.decode.session import DecodeConfig
from pdserve.engine.port import Output
from pdserve.kvd.client.messages import Outcome
from pdserve.rpc import errors
from tests.unit.decode.world import FAIL, World
from tests.unit.served import TID, refused

REFUSALS = [
    (Outcome.FAILED, "STALE_EPOCH", errors.StaleEpoch),
    (Outcome.FAILED, "TRANSFER_USED", errors.TransferUsed),
    (Outcome.FAILED, "PEER_LOST", errors.PeerLost),
    (Outcome.CANCELLED, "PRODUCER_FAILED", errors.ProducerFailed),
    (Outcome.EXPIRED, "TRANSFER_EXPIRED", errors.TransferExpired),
    (Outcome.FAILED, "KVD_UNAVAILABLE", errors.KvdUnavailable),
    (Outcome.FAILED, "", errors.TransferFailed),
]


@pytest.mark.parametrize(("outcome", "reason", "kind"), REFUSALS)
async def test_a_bad_end_fails_the_request(
    world: World, outcome: Outcome, reason: str, kind: type[errors.PdserveError]
) -> None:
    """As the class of kvd's reason; the engine's request is aborted before the error is out."""
    call = world.ask(on_failure=FAIL)
    run = await world.engine.next_run()
    world.handoffs.end(TID, 0, outcome, reason)
    assert type(await refused(call)) is kind
    assert run.aborted.is_set()


async def test_one_bad_end_ends_all_answers(world: World) -> None:
    """The other n - 1 are aborted and their parts of the transfer given up."""
    call = world.ask(sampling=common_pb2.SamplingParams(n=3), on_failure=FAIL)
    runs = [await world.engine.next_run() for _ in range(3)]
    world.handoffs.end(TID, 0, Outcome.LANDED)
    world.handoffs.end(TID, 1, Outcome.FAILED, "PEER_LOST")
    assert isinstance(await refused(call), errors.PeerLost)
    assert all(run.aborted.is_set() for run in runs)
    assert world.handoffs.cancelled == [(TID, "CONSUMER_FAILED")]


async def test_kvd_s_reason_wins_over_the_engine_s(world: World) -> None:
    """An engine knows only that its load failed."""
    call = world.ask(on_failure=FAIL)
    run = await world.engine.next_run()
    world.handoffs.end(TID, 0, Outcome.FAILED, "PEER_LOST")
    run.fail(errors.TransferFailed("load failed"))
    assert isinstance(await refused(call), errors.PeerLost)


async def test_the_engine_s_error_ends_the_request(world: World) -> None:
    """And releases the producer."""
    call = world.ask()
    (await world.engine.next_run()).fail(errors.PoolExceeded("too many blocks"))
    assert isinstance(await refused(call), errors.PoolExceeded)
    assert world.handoffs.cancelled == [(TID, "CONSUMER_FAILED")]


async def test_no_kvd_no_hand_over(world: World) -> None:
    """Refused before the engine reserves blocks."""
    world.handoffs.away = True
    assert isinstance(await refused(world.ask()), errors.KvdUnavailable)
    assert world.engine.runs == []


@pytest.mark.parametrize("world", [DecodeConfig(settle_seconds=0.05)], indirect=True)
async def test_a_missing_end_does_not_keep_the_answer(world: World) -> None:
    """The wait for facts has a deadline; the transfer is given up then."""
    with capture_logs() as logs:
        call = world.ask()
        (await world.engine.next_run()).answer([65])
        finished = [message async for message in call][-1].finished
    assert not finished.HasField("transfer")
    assert "end_missing" in [line["event"] for line in logs]
    await world.idle()
    assert [transfer_id for transfer_id, _ in world.handoffs.cancelled] == [TID]


@pytest.mark.parametrize("world", [DecodeConfig(transfer_seconds=0.05)], indirect=True)
async def test_a_silent_kvd_ends_the_request(world: World) -> None:
    """A consumer never waits for ever."""
    call = world.ask()
    run = await world.engine.next_run()
    assert isinstance(await refused(call), errors.DeadlinePassed)
    assert run.aborted.is_set()


@pytest.mark.parametrize("phase", ["waiting", "streaming"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
async def test_leaving_aborts_all_answers(world: World, how: str, phase: str) -> None:
    """However the caller goes: aborted at the engine, and cancelled at kvd unless all has landed."""
    call = world.ask(sampling=common_pb2.SamplingParams(n=2), timeout=1.0 if how == "deadline" else 20)
    runs = [await world.engine.next_run() for _ in range(2)]
    if phase == "streaming":
        for index, run in enumerate(runs):
            world.handoffs.end(TID, index, Outcome.LANDED)
            run.say(Output((65,), "A"))
        await call.read()
    if how == "cancel":
        call.cancel()
    elif how == "channel":
        await world.channel.close()
    for run in runs:
        await asyncio.wait_for(run.aborted.wait(), 5)
    await world.idle()
    assert world.handoffs.cancelled == ([(TID, "CANCELLED")] if phase == "waiting" else [])


async def test_draining_refuses_and_releases(world: World) -> None:
    """A request that comes too late gives its producer's blocks back."""
    drained = asyncio.create_task(world.calls.drain())
    await asyncio.wait_for(drained, 5)
    assert isinstance(await refused(world.ask()), errors.Draining)
    assert world.handoffs.cancelled == [(TID, "CONSUMER_FAILED")]
