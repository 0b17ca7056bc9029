"""Engines that come and go behind a running proxy: registration, restart, broken channels, silence."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.testing import FakeEngine, echo_decode, prompt_prefill
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import PdserveError, RequestCancelled
from pdserve.rpc.status import to_error
from pdserve.runtime.beats import decode_reply
from pdserve.runtime.config import split_address
from pdserve.runtime.signing import Signer


async def generate(deployment: Any, **fields: Any) -> list[Any]:
    """All events of one request; raises the typed error."""
    async with aio_channel(deployment.app.addresses.grpc) as channel:
        stub: Any = serving_pb2_grpc.InferenceStub(channel)
        request = serving_pb2.GenerateRequest(**({"text": "x", "sampling": {"max_tokens": 2}} | fields))
        try:
            return [event async for event in stub.Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from None


async def gone(deployment: Any, engine: FakeEngine) -> None:
    """Waits until the proxy has evicted an engine."""
    await deployment.until(lambda: deployment.app.registry.get(engine.engine_id) is None)


async def test_an_engine_that_dies_is_evicted_at_once(pair: Any) -> None:
    """Its channel breaks: its open legs fail, its credits are void, nothing new is sent to it."""
    deployment, _, decode = pair

    async def endless(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            yield message
            await asyncio.Event().wait()

    decode.on_decode = endless
    running = asyncio.ensure_future(generate(deployment))
    await deployment.until(lambda: len(decode.decodes) == 1)
    await decode.stop()
    with pytest.raises(PdserveError) as caught:
        await running
    assert caught.value.code == "UNAVAILABLE"
    await gone(deployment, decode)
    with pytest.raises(PdserveError, match="no prefill and decode pair") as refused:
        await generate(deployment)
    assert refused.value.reason == "NO_ENGINES"
    await deployment.app.drain()
    assert deployment.held() == 0


async def test_a_request_moves_to_another_prefill_when_one_dies(deploy: Any) -> None:
    """The client sees one answer, and that it took a fallback."""
    deployment = await deploy()
    prefills = [await deployment.engine("prefill") for _ in range(2)]
    await deployment.engine("decode")
    chosen: list[FakeEngine] = []
    dying: list[asyncio.Task[None]] = []

    async def die(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        chosen.append(engine)
        if len(chosen) == 1:
            dying.append(asyncio.create_task(engine.stop()))
            await asyncio.Event().wait()
        async for message in prompt_prefill(engine, request):
            yield message

    for prefill in prefills:
        prefill.on_prefill = die
    events = await generate(deployment)
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "finished"]
    assert events[-1].finished.fallbacks == 1
    await asyncio.gather(*dying)
    assert events[-1].finished.prefill_engine_id == chosen[1].engine_id != chosen[0].engine_id


async def test_a_restarted_engine_replaces_the_old_one(pair: Any) -> None:
    """Same address, new id: the old one is out before any beat is missed, the new one serves."""
    deployment, prefill, _ = pair
    reborn = FakeEngine("prefill", deployment.signer, deployment.handovers)
    port = int(prefill.address.rpartition(":")[2])
    await prefill.stop()
    await reborn.start(port)
    try:
        assert (await reborn.register(deployment.app.addresses.registration)).ok
        assert deployment.app.registry.get(prefill.engine_id) is None
        await deployment.routable(reborn)
        events = await generate(deployment)
        assert events[-1].finished.prefill_engine_id == reborn.engine_id
    finally:
        await reborn.stop()


async def test_a_stuck_engine_is_cut_off(deploy: Any) -> None:
    """Its steps stand still while work waits: its open legs fail now, though it beats and its channel is up."""
    deployment = await deploy(beats_stalled=2, on_failure="fail")
    await deployment.engine("prefill")
    decode = await deployment.engine("decode")

    async def stuck(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    decode.on_decode = stuck
    running = asyncio.ensure_future(generate(deployment))
    await deployment.until(lambda: len(decode.decodes) == 1)
    for _ in range(3):
        assert (await decode.beat(waiting=1, steps=7)).ok
    with pytest.raises(PdserveError, match="went away during the call") as caught:
        await running
    assert caught.value.reason == "ENGINE_DIED"
    await decode.idle.wait()
    (line,) = (e for e in deployment.app.inference.topology().engines if e.engine_id == decode.engine_id)
    assert (line.state, line.excluded_because[:30]) == ("suspect", "its step counter stands still ")
    assert (await decode.beat(waiting=1, steps=8)).ok
    await deployment.routable(decode)
    await deployment.app.drain()


async def test_silence_evicts(deploy: Any) -> None:
    """Missed beats, though the channel is up. One that comes after all brings the engine back, for as long again."""
    deployment = await deploy(beat_interval=0.2)
    engine = FakeEngine("prefill", deployment.signer)
    await engine.start()
    try:
        assert (await engine.register(deployment.app.addresses.registration)).ok
        await gone(deployment, engine)
        assert (await engine.beat()).ok
        assert deployment.app.registry.get(engine.engine_id) is not None
    finally:
        await engine.stop()


async def test_bye_lets_open_answers_end(pair: Any) -> None:
    """A graceful leave hangs up only after what is open."""
    deployment, _, decode = pair
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            yield message
            await go_on.wait()

    decode.on_decode = slow
    running = asyncio.ensure_future(generate(deployment))
    await deployment.until(lambda: len(decode.decodes) == 1)
    assert (await decode.beat(state="bye")).ok
    assert deployment.app.registry.get(decode.engine_id) is None
    go_on.set()
    assert (await running)[-1].WhichOneof("event") == "finished"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"signer": Signer(b"another key altogether")}, "UNAUTHENTICATED"),
        ({"frame": b"\xc1"}, "INVALID_REQUEST"),
        ({"frame": msgspec.msgpack.encode({"engine_id": "e"})}, "UNAUTHENTICATED"),
    ],
)
async def test_a_refused_registration_says_why(deploy: Any, change: dict[str, Any], reason: str) -> None:
    """The engine hears the reason and is not listed."""
    deployment = await deploy()
    where = deployment.app.addresses.registration
    if "signer" in change:
        engine = FakeEngine("prefill", change["signer"])
        await engine.start()
        try:
            reply = await engine.register(where)
        finally:
            await engine.stop()
    else:
        reply = decode_reply(await exchange(where, change["frame"]))
    assert (reply.ok, reply.reason) == (False, reason)
    assert deployment.app.registry.entries() == []


async def test_a_replayed_beat_is_refused(pair: Any) -> None:
    """A tag is good for a while; the number of the last beat is not."""
    _, prefill, _ = pair
    assert (await prefill.beat(beat=50)).ok
    reply = await prefill.beat(beat=50)
    assert (reply.ok, reply.reason, reply.beat) == (False, "INVALID_REQUEST", 50)


async def test_a_call_that_the_service_cancels_is_not_the_clients_doing(pair: Any) -> None:
    """CANCELLED from below means that the engine is going; only a client's own cancel is CANCELLED."""
    _, prefill, _ = pair

    async def cancel(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        raise RequestCancelled("closing")
        yield

    prefill.on_prefill = cancel
    with pytest.raises(PdserveError) as caught:
        await generate(pair[0], on_failure=common_pb2.FAILURE_POLICY_FAIL)
    assert caught.value.reason == "ENGINE_DIED"


async def exchange(where: str, frame: bytes, answered: bool = True) -> bytes:
    """Sends a frame to the registration socket and returns the answer."""
    host, port = split_address(where)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://{host}:{port}")
    try:
        await socket.send(frame)
        return await asyncio.wait_for(socket.recv(), 5.0 if answered else 0.1)
    finally:
        socket.close()
        context.term()


async def test_a_stock_instance_is_foreign(deploy: Any) -> None:
    """Listed with the reason, answered with nothing, never routed to."""
    deployment = await deploy()
    stock = {
        "type": "P",
        "http_address": "10.0.0.1:8000",
        "zmq_address": "host:10.0.0.1,handshake:1,notify:2",
        "dp_size": 1,
        "tp_size": 8,
        "transfer_mode": "WRITE",
    }
    with pytest.raises(TimeoutError):
        await exchange(deployment.app.addresses.registration, msgspec.msgpack.encode(stock), answered=False)
    (line,) = deployment.app.inference.topology().engines
    assert (line.state, line.address, line.role) == ("foreign", "10.0.0.1:8000", "prefill")
    assert "stock MORI-IO" in line.excluded_because
    assert deployment.app.inference.models() == []


async def test_incompatible_engines_are_refused_before_prefill(deploy: Any) -> None:
    """What differs is named to the client and in the topology; no engine computes in vain."""
    deployment = await deploy()
    prefill = await deployment.engine("prefill")
    await deployment.engine("decode", identity={"model": "fake", "kv_dtype": "fp8"})
    with pytest.raises(PdserveError, match="kv_dtype: float32 != fp8") as caught:
        await generate(deployment)
    assert caught.value.reason == "INCOMPATIBLE_ENGINES"
    assert prefill.prefills == []
    lines = deployment.app.inference.topology().engines
    assert all("shares its identity" in line.excluded_because for line in lines)


async def test_each_model_has_its_own_engines(deploy: Any) -> None:
    """Requests go to their model; without a name there must be only one."""
    deployment = await deploy()
    for model in ("a", "b"):
        for role in ("prefill", "decode"):
            await deployment.engine(role, model=model)
    events = await generate(deployment, model="b")
    assert events[0].started.model == "b"
    with pytest.raises(PdserveError, match="name one of the models a, b"):
        await generate(deployment)


async def test_credits_bound_what_is_dispatched(deploy: Any) -> None:
    """The pool has room for one: the second waits in the proxy and goes when the first has ended."""
    deployment = await deploy(admission_headroom=0, admission_queue=1)
    prefill = await deployment.engine("prefill", pool=64)
    decode = await deployment.engine("decode", pool=64)
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        await go_on.wait()
        async for message in echo_decode(engine, request):
            yield message

    decode.on_decode = slow
    runs = [asyncio.ensure_future(generate(deployment, text="x" * 40)) for _ in range(2)]
    await deployment.until(lambda: len(decode.decodes) == 1 and deployment.app.inference.topology().queued == 1)
    assert len(prefill.prefills) == 1
    topology = deployment.app.inference.topology()
    assert (topology.queued, topology.in_flight) == (1, 1)
    with pytest.raises(PdserveError) as refused:
        await generate(deployment, text="")
    assert refused.value.reason == "OVERLOADED", "before anything is spent on it, even a look at its prompt"
    go_on.set()
    await asyncio.gather(*runs)
    assert len(prefill.prefills) == 2
    await deployment.app.drain()
    assert deployment.held() == 0
