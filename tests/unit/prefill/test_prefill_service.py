"""A prefill request over a real loopback server: computed, offered and held until it is released."""

import asyncio

import grpc
import msgspec
import pytest
from structlog.testing import capture_logs

from pdserve.api.common.v1 import common_pb2
from pdserve.engine.hosting.testing import INFO
from pdserve.engine.port import EngineTimes, Finish, Output, Produce
from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.types import Mode, Ticket
from pdserve.prefill.session import PrefillConfig
from pdserve.rpc import errors, status
from pdserve.rpc.status import to_error
from pdserve.runtime.clock import Clock, boot_id
from pdserve.runtime.signing import Kind
from tests.unit.prefill.world import World, locator, ready
from tests.unit.served import OTHER, SIGNER, TID, refused, rest


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


async def test_released_may_overtake_the_engine(world: World) -> None:
    """In WRITE kvd may be done before the engine's last output is here."""
    call = world.ask(mode=common_pb2.TRANSFER_MODE_WRITE, peer_locator=locator())
    run = await world.engine.next_run()
    world.handoffs.end(TID, None, Outcome.RELEASED)
    run.answer([65])
    events = [message.WhichOneof("event") async for message in call]
    assert events == ["ready", "released"]


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
