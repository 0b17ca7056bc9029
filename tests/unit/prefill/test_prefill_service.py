"""A prefill request over a real loopback server: computed, offered, held, and given up in every other case.

Fake: the engine and kvd, which say what each test tells them to.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.stamps import Progress
from pdserve.engine.hosting.testing import INFO, Run, ScriptedEngine, ScriptedHandoffs
from pdserve.engine.port import EngineTimes, Finish, Output, Produce, Sampling
from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.types import Mode, Ticket
from pdserve.prefill import session
from pdserve.prefill.service import NAME, PrefillService
from pdserve.prefill.session import Ask, PrefillConfig, Prefiller
from pdserve.rpc import errors, status
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock, boot_id
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Kind, Signer

TID = bytes(range(16))
OTHER = bytes(16)
SIGNER = Signer(b"the key of this cluster")
PEER = replace(INFO, engine_id="decode-engine")


def locator(signer: Signer = SIGNER, expires_at: float = 0.0, **identity: str) -> bytes:
    """A decode engine's locator."""
    info = replace(PEER, identity={**INFO.identity, **identity})
    return Peers(info, "unix:/kvd", signer).our_locator(expires_at)


class World:
    """One prefill service, served."""

    def __init__(self, config: PrefillConfig) -> None:
        self.engine = ScriptedEngine()
        self.handoffs = ScriptedHandoffs()
        self.calls = Calls()
        peers = Peers(INFO, "unix:/run/kvd.sock", SIGNER)
        prefiller = Prefiller(self.engine, self.handoffs, peers, self.calls, Clock(), config)
        self.server = Server([NAME])
        servicer = PrefillService(prefiller, self.calls, Clock())
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, self.server.grpc)
        self.channel = aio_channel(f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}")
        self.stub = prefill_pb2_grpc.PrefillStub(self.channel)

    def ask(self, **changes: Any) -> Any:
        """A call with a good request, changed."""
        values: dict[str, Any] = {
            "request_id": "r1",
            "transfer_id": TID,
            "mode": common_pb2.TRANSFER_MODE_READ,
            "prompt_token_ids": [1, 2, 3],
            "consumers": 1,
        }
        timeout = changes.pop("timeout", 20)
        return self.stub.Prefill(prefill_pb2.PrefillRequest(**(values | changes)), timeout=timeout)

    async def idle(self) -> None:
        """Waits until no work is left, and checks that nothing is held."""
        await asyncio.wait_for(self.calls.idle(), 5)
        assert all(run.ended.is_set() for run in self.engine.runs)
        assert all(watch.closed for watch in self.handoffs.watches.values())


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Served; at its end nothing is held."""
    world = World(getattr(request, "param", PrefillConfig()))
    await world.server.start()
    yield world
    await world.channel.close()
    await world.server.stop()
    await world.calls.aclose()
    await world.idle()


async def rest(call: Any) -> None:
    """Reads a call to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def refused(call: Any) -> errors.PdserveError:
    """The typed error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(call)
    return to_error(raised.value)


async def ready(world: World, call: Any) -> tuple[Run, Any]:
    """Lets the engine answer, and reads `ready`."""
    run = await world.engine.next_run()
    run.answer([65])
    message = await call.read()
    assert message.WhichOneof("event") == "ready"
    return run, message.ready


async def test_a_request_is_computed_offered_and_released(world: World) -> None:
    """`ready` with a signed ticket and the stamps, then `released` with what kvd said."""
    call = world.ask(peer_locator=locator())
    run = await world.engine.next_run()
    run.say(
        Output(
            token_ids=(65,),
            finish=Finish.LENGTH,
            cached_tokens=2,
            offered_tokens=3,
            offered_blocks=1,
            times=EngineTimes(scheduled_ns=11, first_token_ns=22),
        )
    )
    offer = (await call.read()).ready
    assert (offer.first_token_id, offer.cached_tokens) == (65, 2)
    assert offer.stamps.boot_id == boot_id()
    taken = {stamp.point: stamp.monotonic_ns for stamp in offer.stamps.stamps}
    assert taken.pop(common_pb2.CUT_POINT_PREFILL_RECEIVED) > 0
    assert taken == {common_pb2.CUT_POINT_PREFILL_SCHEDULED: 11, common_pb2.CUT_POINT_PREFILL_FORWARD_END: 22}

    now = Clock().unix()
    ticket = msgspec.msgpack.decode(SIGNER.verify(Kind.TICKET, offer.ticket, now), type=Ticket)
    assert (ticket.transfer_id, ticket.tokens, ticket.blocks) == (TID, 3, 1)
    assert (ticket.locator.engine_id, ticket.locator.kvd_address) == (INFO.engine_id, "unix:/run/kvd.sock")
    with pytest.raises(errors.TicketExpired):
        SIGNER.verify(Kind.TICKET, offer.ticket, now + 31)

    world.handoffs.end(TID, None, Outcome.RELEASED, facts=Facts(kv_bytes=640, blocks=1, transport="shm"))
    released = (await call.read()).released
    assert (released.transfer.kv_bytes, released.transfer.transport) == (640, "shm")
    assert await call.read() is grpc.aio.EOF
    await world.idle()
    assert world.handoffs.cancelled == []


async def test_only_what_shapes_the_first_token_reaches_the_engine(world: World) -> None:
    """One token, ended by length, whatever the request says of its answer."""
    sampling = common_pb2.SamplingParams(
        max_tokens=50, min_tokens=9, temperature=0.5, seed=7, stop=["x"], stop_token_ids=[1], n=2, logprobs=3
    )
    call = world.ask(sampling=sampling, consumers=2, mode=common_pb2.TRANSFER_MODE_WRITE, peer_locator=locator())
    run, _ = await ready(world, call)
    asked = run.request.sampling
    assert (asked.max_tokens, asked.min_tokens, asked.stop, asked.stop_token_ids) == (1, 0, (), ())
    assert (asked.ignore_eos, asked.logprobs, asked.temperature, asked.seed) == (True, None, 0.5, 7)
    assert run.request.kv == Produce(TID, Mode.WRITE, 2, locator())
    call.cancel()


LONG = list(range(100)) * 3

BAD: dict[str, tuple[dict[str, Any], type[errors.PdserveError], bool]] = {
    "empty prompt": ({"prompt_token_ids": []}, errors.EmptyPrompt, True),
    "beyond the context": ({"prompt_token_ids": LONG}, errors.ContextExceeded, True),
    "not in the vocabulary": ({"prompt_token_ids": [258]}, errors.InvalidRequest, True),
    "no mode": ({"mode": 0}, errors.InvalidRequest, True),
    "no consumer": ({"consumers": 0}, errors.InvalidRequest, True),
    "odd request id": ({"request_id": "a\nb"}, errors.InvalidRequest, True),
    "NaN": ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, errors.InvalidRequest, True),
    "WRITE without a peer": ({"mode": common_pb2.TRANSFER_MODE_WRITE}, errors.InvalidRequest, True),
    "forged peer": ({"peer_locator": locator(Signer(b"another key"))}, errors.TicketForged, True),
    "expired peer": ({"peer_locator": locator(expires_at=1000.0)}, errors.TicketExpired, True),
    "ticket as locator": ({"peer_locator": SIGNER.sign(Kind.TICKET, b"x")}, errors.TicketForged, True),
    "odd locator": ({"peer_locator": SIGNER.sign(Kind.LOCATOR, b"x")}, errors.TicketRefused, True),
    "other model": ({"peer_locator": locator(model="m2")}, errors.IncompatibleEngines, True),
    "short transfer id": ({"transfer_id": b"short"}, errors.InvalidRequest, False),
    "no transfer id": ({"transfer_id": b""}, errors.InvalidRequest, False),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_name_before_the_engine(world: World, name: str) -> None:
    """And a decode leg that may wait for this transfer is told at once."""
    changes, kind, told = BAD[name]
    error = await refused(world.ask(**changes))
    assert type(error) is kind
    assert world.engine.runs == []
    await world.idle()
    assert world.handoffs.cancelled == ([(TID, "PRODUCER_FAILED")] if told else [])


async def test_incompatible_engines_are_told_what_differs(world: World) -> None:
    """The metadata names it."""
    error = await refused(world.ask(peer_locator=locator(model="m2", dtype="bf16")))
    assert error.metadata == {"model": "scripted != m2", "dtype": "None != bf16"}


async def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    """Where the context would allow it."""
    small = replace(INFO, num_blocks=2)
    prefiller = Prefiller(
        ScriptedEngine(small), ScriptedHandoffs(), Peers(small, "", SIGNER), Calls(), Clock(), PrefillConfig()
    )
    ask = Ask("r", TID, Mode.READ, tuple(range(33)), Sampling(), b"", 1)
    with pytest.raises(errors.PoolExceeded):
        await anext(prefiller.run(TID, lambda: ask, Progress()))


async def test_a_transfer_id_is_good_once(world: World) -> None:
    """At the same time or later; the request that has it goes on untouched."""
    first = world.ask()
    await ready(world, first)
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []
    world.handoffs.end(TID, None, Outcome.RELEASED)
    assert (await first.read()).WhichOneof("event") == "released"
    await world.idle()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []


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


async def test_released_may_overtake_the_engine(world: World) -> None:
    """In WRITE kvd may be done before the engine's last output is here."""
    call = world.ask(mode=common_pb2.TRANSFER_MODE_WRITE, peer_locator=locator())
    run = await world.engine.next_run()
    world.handoffs.end(TID, None, Outcome.RELEASED)
    run.answer([65])
    events = [message.WhichOneof("event") async for message in call]
    assert events == ["ready", "released"]


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


async def test_draining_finishes_what_there_is_and_takes_nothing_new(world: World) -> None:
    """What is refused is told to its other leg."""
    call = world.ask()
    await ready(world, call)
    drain = asyncio.create_task(world.calls.drain())
    await asyncio.sleep(0)
    assert isinstance(await refused(world.ask(transfer_id=OTHER)), errors.Draining)
    assert world.handoffs.cancelled == [(OTHER, "PRODUCER_FAILED")]
    assert not drain.done()
    world.handoffs.end(TID, None, Outcome.RELEASED)
    assert (await call.read()).WhichOneof("event") == "released"
    await asyncio.wait_for(drain, 5)


async def test_a_failed_call_says_how_far_it_came(world: World) -> None:
    """Beside the error, which is as it would be without: its stamps, and what the engine has not said."""
    call = world.ask()
    (await world.engine.next_run()).fail(errors.EngineDied("out of memory"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(call)
    error = to_error(raised.value)
    assert (type(error), error.message) == (errors.EngineDied, "out of memory")
    said = common_pb2.Progress.FromString(status.progress(raised.value))
    (stamp,) = said.stamps.stamps
    assert (stamp.point, said.stamps.boot_id) == (common_pb2.CUT_POINT_PREFILL_RECEIVED, boot_id())
    assert 0 < stamp.monotonic_ns < said.ended_ns <= Clock().monotonic_ns()
    assert list(said.unseen) == [common_pb2.CUT_POINT_PREFILL_SCHEDULED]
    assert not said.HasField("transfer")


async def test_prompts_are_not_logged(world: World) -> None:
    """Neither of a request that works nor of one that fails."""
    with capture_logs() as logs:
        call = world.ask(prompt_token_ids=[71, 72, 73])
        await ready(world, call)
        world.handoffs.end(TID, None, Outcome.RELEASED)
        await call.read()
        await refused(world.ask(transfer_id=OTHER, prompt_token_ids=[71] * 300))
        await world.idle()
    assert {line["event"] for line in logs} >= {"prefill_ended", "prefill_failed"}
    assert "71, 72" not in repr(logs)


def test_deadlines_must_make_sense() -> None:
    """A config that cannot work is refused when it is made."""
    with pytest.raises(ValueError, match="above 0"):
        PrefillConfig(compute_seconds=0)
