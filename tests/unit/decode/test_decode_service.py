"""A decode request over a real loopback server: taken over, streamed, and given up in every other case.

Fake: the engine and kvd, which say what each test tells them to.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.decode.service import NAME, DecodeService
from pdserve.decode.session import DecodeConfig, Decoder
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.testing import INFO, ScriptedEngine, ScriptedHandoffs
from pdserve.engine.port import Candidate, Consume, EngineTimes, Finish, Output, Position
from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.types import Mode
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock, boot_id
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Kind, Signer

TID = bytes(range(16))
OTHER = bytes(16)
PROMPT = [1, 2, 3]
SIGNER = Signer(b"the key of this cluster")
READ, WRITE = common_pb2.TRANSFER_MODE_READ, common_pb2.TRANSFER_MODE_WRITE
FAIL, RECOMPUTE = common_pb2.FAILURE_POLICY_FAIL, common_pb2.FAILURE_POLICY_RECOMPUTE
FACTS = Facts(
    kv_bytes=100,
    blocks=2,
    layers=4,
    ranks=1,
    copy_ns=7,
    transport="shm",
    lanes="memcpy",
    first_post_ns=20,
    landed_ns=30,
    overlapped_bytes=50,
    offered_ns=10,
    accepted_ns=15,
    last_byte_ns=25,
)


def producer(signer: Signer = SIGNER, **identity: str) -> Peers:
    """A prefill engine that signs."""
    info = replace(INFO, engine_id="prefill-engine", identity={**INFO.identity, **identity})
    return Peers(info, "unix:/kvd", signer)


def ticket(
    signer: Signer = SIGNER, transfer_id: bytes = TID, tokens: int = 3, expires_at: float = 0.0, **identity: str
) -> bytes:
    """What prefill's `ready` carried."""
    return producer(signer, **identity).our_ticket(transfer_id, tokens, 1, expires_at)


def source(**changes: Any) -> decode_pb2.KvSource:
    """A good READ source, changed."""
    values: dict[str, Any] = {"transfer_id": TID, "mode": READ}
    if "peer_locator" not in changes:
        values["ticket"] = ticket()
    return decode_pb2.KvSource(**{name: value for name, value in (values | changes).items() if value is not None})


class World:
    """One decode service, served."""

    def __init__(self, config: DecodeConfig, kvd: bool = True) -> None:
        self.engine = ScriptedEngine()
        self.handoffs = ScriptedHandoffs()
        self.calls = Calls()
        peers = Peers(INFO, "unix:/run/kvd.sock", SIGNER)
        self.decoder = Decoder(self.engine, self.handoffs if kvd else None, peers, self.calls, Clock(), config)
        self.server = Server([NAME])
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(self.decoder, self.calls, Clock()), self.server.grpc)
        self.channel = aio_channel(f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}")
        self.stub = decode_pb2_grpc.DecodeStub(self.channel)

    def ask(self, **changes: Any) -> Any:
        """A call with a good request, changed."""
        values: dict[str, Any] = {"request_id": "r1", "prompt_token_ids": PROMPT, "source": source()}
        timeout = changes.pop("timeout", 20)
        return self.stub.Decode(decode_pb2.DecodeRequest(**(values | changes)), timeout=timeout)

    async def idle(self) -> None:
        """Waits until no work is left, and checks that nothing is held."""
        await asyncio.wait_for(self.calls.idle(), 5)
        assert all(run.ended.is_set() for run in self.engine.runs)
        assert all(watch.closed for watch in self.handoffs.watches.values())


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Served; at its end nothing is held."""
    world = World(getattr(request, "param", DecodeConfig()))
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


def taken(stamps: common_pb2.Stamps) -> dict[str, int]:
    """Stamps by name."""
    return {common_pb2.CutPoint.Name(s.point).removeprefix("CUT_POINT_"): s.monotonic_ns for s in stamps.stamps}


async def test_a_hand_over_is_taken_and_streamed(world: World) -> None:
    """Tokens as they come, the first with stamps, then the sum with kvd's facts."""
    call = world.ask(sampling=common_pb2.SamplingParams(max_tokens=2, temperature=0.0))
    run = await world.engine.next_run()
    assert run.request.kv == Consume(TID, Mode.READ, 0, ticket(), b"", False)
    assert (run.request.sampling.max_tokens, run.request.sampling.temperature) == (2, 0.0)
    world.handoffs.end(TID, 0, Outcome.LANDED, facts=FACTS)
    run.say(Output((65,), "A", times=EngineTimes(40, 50), cached_tokens=1))
    first = (await call.read()).tokens
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "A", [65], 0)
    stamps = taken(first.stamps)
    assert first.stamps.boot_id == boot_id()
    assert stamps.pop("DETOKENIZED") >= stamps.pop("DECODE_RECEIVED") > 0
    assert stamps == {
        "DECODE_BLOCKS_RESERVED": 15,
        "KV_LANDED": 30,
        "DECODE_SCHEDULED": 40,
        "FIRST_TOKEN_SAMPLED": 50,
    }
    run.say(Output((66,), "B", finish=Finish.STOP, stop_reason="B", cached_tokens=1, recomputed_tokens=1))
    second = (await call.read()).tokens
    assert (second.finish_reason, second.stop_reason) == (common_pb2.FINISH_REASON_STOP, "B")
    assert not second.HasField("stamps")
    finished = (await call.read()).finished
    assert (finished.completion_tokens, finished.cached_tokens, finished.recomputed_tokens) == (2, 1, 1)
    assert {f.name: v for f, v in finished.transfer.ListFields()} == {
        name: getattr(FACTS, name) for name in Facts.__slots__
    }
    assert await call.read() is grpc.aio.EOF
    await world.idle()
    assert world.handoffs.cancelled == []


async def test_write_names_the_peer(world: World) -> None:
    """The engine gets the prefill engine's locator instead of a ticket."""
    locator = producer().our_locator(0.0)
    call = world.ask(source=source(mode=WRITE, peer_locator=locator), on_failure=RECOMPUTE)
    run = await world.engine.next_run()
    assert run.request.kv == Consume(TID, Mode.WRITE, 0, b"", locator, True)
    world.handoffs.end(TID, 0, Outcome.LANDED)
    run.answer([65])
    assert [message.WhichOneof("event") async for message in call] == ["tokens", "finished"]


@pytest.mark.parametrize("kvd", [True, False])
async def test_without_a_source_the_engine_answers_alone(kvd: bool) -> None:
    """Also on a service that has no kvd; nothing is watched, nothing cancelled."""
    world = World(DecodeConfig(), kvd)
    await world.server.start()
    call = world.ask(source=None)
    run = await world.engine.next_run()
    assert run.request.kv is None
    run.answer([65, 66], cached_tokens=2)
    tokens, finished = [message async for message in call]
    assert set(taken(tokens.tokens.stamps)) == {"DECODE_RECEIVED", "DETOKENIZED"}
    assert finished.finished.completion_tokens == 2
    assert not finished.finished.HasField("transfer")
    assert (world.handoffs.watches, world.handoffs.cancelled) == ({}, [])
    if not kvd:
        assert isinstance(await refused(world.ask()), errors.KvdUnavailable)
    await world.channel.close()
    await world.server.stop()


async def test_logprobs_come_through(world: World) -> None:
    """Position by position, best first."""
    call = world.ask(source=None, sampling=common_pb2.SamplingParams(logprobs=1))
    run = await world.engine.next_run()
    assert run.request.sampling.logprobs == 1
    run.say(
        Output((65,), "A", logprobs=(Position(Candidate(65, "A", -0.5), (Candidate(66, "B", -0.25),)),)),
        Output(finish=Finish.LENGTH),
    )
    tokens = (await call.read()).tokens
    (position,) = tokens.logprobs
    assert (position.sampled.token_id, position.sampled.token, position.sampled.logprob) == (65, "A", -0.5)
    assert [(c.token_id, c.logprob) for c in position.top] == [(66, -0.25)]
    last = (await call.read()).tokens
    assert (last.text, last.finish_reason) == ("", common_pb2.FINISH_REASON_LENGTH)


async def test_n_answers_are_n_requests_with_their_own_seeds(world: World) -> None:
    """Each takes its own part of the transfer; their tokens come marked; the facts add up."""
    call = world.ask(sampling=common_pb2.SamplingParams(n=3, seed=40))
    runs = [await world.engine.next_run() for _ in range(3)]
    consumers = [run.request.kv.consumer for run in runs if isinstance(run.request.kv, Consume)]
    assert consumers == [0, 1, 2]
    assert [run.request.sampling.seed for run in runs] == [40, 41, 42]
    assert len({run.request.request_id for run in runs}) == 3
    for index in (2, 0, 1):
        world.handoffs.end(TID, index, Outcome.LANDED, facts=replace(FACTS, landed_ns=30 + index, accepted_ns=index))
        runs[index].answer([65 + index], cached_tokens=index, recomputed_tokens=1)
        tokens = (await call.read()).tokens
        assert (tokens.index, tokens.token_ids) == (index, [65 + index])
        assert tokens.HasField("stamps") == (index == 2)
        if index == 2:
            assert taken(tokens.stamps)["KV_LANDED"] == 32
    finished = (await call.read()).finished
    assert (finished.completion_tokens, finished.cached_tokens, finished.recomputed_tokens) == (3, 2, 3)
    facts = finished.transfer
    assert (facts.kv_bytes, facts.blocks, facts.layers, facts.copy_ns, facts.overlapped_bytes) == (300, 6, 4, 21, 150)
    assert (facts.first_post_ns, facts.landed_ns, facts.accepted_ns, facts.transport) == (20, 32, 2, "shm")


async def test_seeds_wrap(world: World) -> None:
    """The largest seed has neighbours, too."""
    call = world.ask(source=None, sampling=common_pb2.SamplingParams(n=2, seed=2**63 - 1))
    runs = [await world.engine.next_run() for _ in range(2)]
    assert [run.request.sampling.seed for run in runs] == [2**63 - 1, -(2**63)]
    call.cancel()


async def test_request_ids_may_repeat(world: World) -> None:
    """A retry of the proxy with the same id is another request of the engine."""
    calls = [world.ask(source=None), world.ask(source=None)]
    runs = [await world.engine.next_run() for _ in calls]
    assert runs[0].request.request_id != runs[1].request.request_id
    for run in runs:
        assert "r1" in run.request.request_id
        run.answer([65])
    for call in calls:
        assert len([message async for message in call]) == 2


LONG = list(range(100)) * 3
LOCATOR = producer().our_locator(0.0)

BAD: dict[str, tuple[dict[str, Any], type[errors.PdserveError]]] = {
    "empty prompt": ({"prompt_token_ids": []}, errors.EmptyPrompt),
    "beyond the context": ({"prompt_token_ids": LONG}, errors.ContextExceeded),
    "answer beyond the context": ({"sampling": common_pb2.SamplingParams(max_tokens=254)}, errors.ContextExceeded),
    "not in the vocabulary": ({"prompt_token_ids": [258]}, errors.InvalidRequest),
    "no tokens": ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, errors.InvalidRequest),
    "no answers": ({"sampling": common_pb2.SamplingParams(n=0)}, errors.InvalidRequest),
    "too many answers": ({"sampling": common_pb2.SamplingParams(n=129)}, errors.InvalidRequest),
    "NaN": ({"sampling": common_pb2.SamplingParams(top_p=float("inf"))}, errors.InvalidRequest),
    "odd request id": ({"request_id": "x" * 257}, errors.InvalidRequest),
    "no mode": ({"source": source(mode=0)}, errors.InvalidRequest),
    "no ticket": ({"source": source(ticket=None)}, errors.InvalidRequest),
    "empty ticket": ({"source": source(ticket=b"")}, errors.InvalidRequest),
    "READ with a locator": ({"source": source(peer_locator=LOCATOR)}, errors.InvalidRequest),
    "WRITE with a ticket": ({"source": source(mode=WRITE)}, errors.InvalidRequest),
    "odd policy": ({"on_failure": 9}, errors.InvalidRequest),
    "forged ticket": ({"source": source(ticket=ticket(Signer(b"another key")))}, errors.TicketForged),
    "noise for a ticket": ({"source": source(ticket=b"noise")}, errors.TicketForged),
    "stale ticket": ({"source": source(ticket=ticket(expires_at=1000.0))}, errors.TicketExpired),
    "another's ticket": ({"source": source(ticket=ticket(transfer_id=OTHER))}, errors.TicketRefused),
    "ticket of another prompt": ({"source": source(ticket=ticket(tokens=4))}, errors.TicketRefused),
    "ticket of another version": ({"source": source(ticket=SIGNER.sign(Kind.TICKET, b"\x80"))}, errors.TicketRefused),
    "ticket of another model": ({"source": source(ticket=ticket(model="m2"))}, errors.IncompatibleEngines),
    "locator for a ticket": ({"source": source(ticket=LOCATOR)}, errors.TicketForged),
    "forged locator": (
        {"source": source(mode=WRITE, peer_locator=producer(Signer(b"another key")).our_locator(0.0))},
        errors.TicketForged,
    ),
    "stale locator": (
        {"source": source(mode=WRITE, peer_locator=producer().our_locator(1000.0))},
        errors.TicketExpired,
    ),
    "locator of another model": (
        {"source": source(mode=WRITE, peer_locator=producer(model="m2").our_locator(0.0))},
        errors.IncompatibleEngines,
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_name_before_the_engine(world: World, name: str) -> None:
    """And prefill's blocks are released at once: no one waits for a lease to run out."""
    changes, kind = BAD[name]
    assert type(await refused(world.ask(**changes))) is kind
    assert world.engine.runs == []
    await world.idle()
    assert world.handoffs.cancelled == [(TID, "CONSUMER_FAILED")]


@pytest.mark.parametrize("transfer_id", [b"", b"short", bytes(17)])
async def test_what_is_no_transfer_id_is_refused(world: World, transfer_id: bytes) -> None:
    """There is nothing to release then."""
    assert type(await refused(world.ask(source=source(transfer_id=transfer_id)))) is errors.InvalidRequest
    assert world.handoffs.cancelled == []


async def test_a_transfer_is_taken_once(world: World) -> None:
    """At the same time or later; the request that has it goes on untouched."""
    first = world.ask()
    run = await world.engine.next_run()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    world.handoffs.end(TID, 0, Outcome.LANDED)
    run.answer([65])
    assert len([message async for message in first]) == 2
    await world.idle()
    assert isinstance(await refused(world.ask()), errors.TransferUsed)
    assert world.handoffs.cancelled == []


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


@pytest.mark.parametrize("by", ["request", "config"])
async def test_a_failed_hand_over_is_recomputed_where_allowed(by: str) -> None:
    """The answer is the same, and says how many tokens were computed here."""
    world = World(DecodeConfig(recompute=by == "config"))
    await world.server.start()
    with capture_logs() as logs:
        call = world.ask(**({"on_failure": RECOMPUTE} if by == "request" else {}))
        run = await world.engine.next_run()
        assert isinstance(run.request.kv, Consume)
        assert run.request.kv.recompute
        world.handoffs.end(TID, 0, Outcome.FAILED, "PEER_LOST")
        run.answer([65], recomputed_tokens=3)
        tokens, finished = [message async for message in call]
    assert {"KV_LANDED", "DECODE_BLOCKS_RESERVED"}.isdisjoint(taken(tokens.tokens.stamps))
    assert finished.finished.recomputed_tokens == 3
    assert not finished.finished.HasField("transfer")
    assert "decode_ended" in [line["event"] for line in logs]
    await world.channel.close()
    await world.server.stop()


@pytest.mark.parametrize("reason", ["TRANSFER_USED", "TICKET_FORGED", "INCOMPATIBLE_ENGINES"])
async def test_a_wrong_request_is_not_recomputed(world: World, reason: str) -> None:
    """Computing its prompt would hide what is wrong with it."""
    call = world.ask(on_failure=RECOMPUTE)
    run = await world.engine.next_run()
    world.handoffs.end(TID, 0, Outcome.FAILED, reason)
    assert (await refused(call)).reason == reason
    assert run.aborted.is_set()


@pytest.mark.parametrize("world", [DecodeConfig(recomputing=1)], indirect=True)
async def test_recomputing_is_capped(world: World) -> None:
    """Past the cap a request fails; a slot is free again with the first token of the one that had it."""
    ids = [bytes([number]) * 16 for number in range(1, 4)]

    async def fails(transfer_id: bytes) -> tuple[Any, Any]:
        call = world.ask(
            on_failure=RECOMPUTE, source=source(transfer_id=transfer_id, ticket=ticket(transfer_id=transfer_id))
        )
        run = await world.engine.next_run()
        world.handoffs.end(transfer_id, 0, Outcome.FAILED, "PEER_LOST")
        return call, run

    first, first_run = await fails(ids[0])
    second, _ = await fails(ids[1])
    assert isinstance(await refused(second), errors.PeerLost)
    first_run.say(Output((65,), "A"))
    assert (await first.read()).tokens.text == "A"
    third, third_run = await fails(ids[2])
    third_run.answer([65], recomputed_tokens=3)
    assert len([message async for message in third]) == 2
    first_run.answer([66])
    assert (await first.read()).tokens.text == "B"
    assert (await first.read()).HasField("finished")


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


async def test_a_slow_reader_gets_everything(world: World) -> None:
    """Nothing is lost or reordered while the caller does not read."""
    call = world.ask(source=None)
    run = await world.engine.next_run()
    run.say(*(Output((number % 200,), "x") for number in range(500)), Output(finish=Finish.LENGTH))
    await asyncio.wait_for(run.ended.wait(), 5)
    ids = [token async for message in call for token in message.tokens.token_ids]
    assert ids == [number % 200 for number in range(500)]


def test_deadlines_must_make_sense() -> None:
    """A config that cannot work is refused when it is made."""
    with pytest.raises(ValueError, match="above 0"):
        DecodeConfig(settle_seconds=0)
