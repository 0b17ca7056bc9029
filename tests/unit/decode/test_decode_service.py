"""A decode request over a real loopback server: taken over and streamed."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.decode.session import DecodeConfig
from pdserve.engine.port import Candidate, Consume, EngineTimes, Finish, Output, Position
from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.types import Mode
from pdserve.rpc import errors
from pdserve.runtime.clock import boot_id
from tests.unit.decode.world import FACTS, RECOMPUTE, WRITE, World, producer, source, taken, ticket
from tests.unit.served import TID, refused


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
    async with World(DecodeConfig(), kvd).serving() as world:
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
