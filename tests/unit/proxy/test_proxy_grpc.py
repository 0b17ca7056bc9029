"""The gRPC face over a real loopback connection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.testing import FakeEngine, echo_decode
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
async def stub(pair: Any) -> AsyncIterator[Any]:
    """A client of the proxy."""
    deployment, _, _ = pair
    async with aio_channel(deployment.app.addresses.grpc) as channel:
        yield serving_pb2_grpc.InferenceStub(channel)


def ask(**changes: Any) -> serving_pb2.GenerateRequest:
    """A request for three tokens."""
    return serving_pb2.GenerateRequest(**({"text": "hello", "sampling": {"max_tokens": 3}} | changes))


@pytest.mark.parametrize("mode", [common_pb2.TRANSFER_MODE_READ, common_pb2.TRANSFER_MODE_WRITE])
async def test_a_stream_has_its_three_kinds_of_event(stub: Any, pair: Any, mode: Any) -> None:
    """Started, one delta a token, finished with everything that is known; the trace goes with the legs."""
    deployment, prefill, decode = pair
    prefill.cached_tokens = 2
    metadata = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
    events = [event async for event in stub.Generate(ask(request_id="mine", mode=mode), metadata=metadata)]
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "delta", "finished"]
    started, finished = events[0].started, events[-1].finished
    assert (started.request_id, started.trace_id, started.model, started.mode) == ("mine", TRACE, "fake", mode)
    assert "".join(event.delta.text for event in events[1:-1]) == "abc"
    assert [event.delta.finish_reason for event in events[1:-1]] == [0, 0, common_pb2.FINISH_REASON_LENGTH]
    assert finished.usage == serving_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
    assert (finished.mode, finished.fallbacks, finished.transfer.kv_bytes) == (mode, 0, 1024)
    assert (finished.prefill_engine_id, finished.decode_engine_id) == (prefill.engine_id, decode.engine_id)
    spent = sum(part.seconds for part in finished.timings.parts) + finished.timings.unattributed_seconds
    assert spent == pytest.approx(finished.timings.ttft_seconds)
    assert finished.timings.e2e_seconds >= finished.timings.ttft_seconds
    for engine in (prefill, decode):
        assert engine.metadata[0]["traceparent"].split("-")[1] == TRACE
    assert prefill.prefills[0].request_id == decode.decodes[0].request_id == "mine"
    assert prefill.prefills[0].transfer_id == decode.decodes[0].source.transfer_id
    await deployment.app.drain()
    assert deployment.held() == 0


async def test_a_cancelled_call_ends_both_legs(stub: Any, pair: Any) -> None:
    """In the middle of the stream."""
    deployment, prefill, decode = pair

    async def endless(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            yield message
            await asyncio.Event().wait()

    decode.on_decode = endless
    call = stub.Generate(ask())
    await call.read()
    await call.read()
    assert deployment.held() > 0
    call.cancel()
    await decode.idle.wait()
    await prefill.idle.wait()
    await deployment.app.drain()
    assert deployment.held() == 0


async def test_the_clients_deadline_ends_both_legs(stub: Any, pair: Any) -> None:
    """A prefill that takes too long: DEADLINE_EXCEEDED, and the legs had the same deadline."""
    deployment, prefill, _ = pair

    async def stuck(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    prefill.on_prefill = stuck
    call = stub.Generate(ask(), timeout=1.0)
    assert (await call.read()).WhichOneof("event") == "started"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await prefill.idle.wait()
    await deployment.app.drain()
    assert deployment.held() == 0


async def test_models_and_topology(stub: Any, pair: Any) -> None:
    """What an operator sees."""
    _, prefill, decode = pair
    models = await stub.ListModels(serving_pb2.ListModelsRequest())
    assert [(model.id, model.max_model_len) for model in models.models] == [("fake", 512)]
    topology = await stub.GetTopology(serving_pb2.GetTopologyRequest())
    assert [(e.engine_id, e.role, e.state, e.excluded_because) for e in topology.engines] == [
        (prefill.engine_id, common_pb2.ENGINE_ROLE_PREFILL, "ready", ""),
        (decode.engine_id, common_pb2.ENGINE_ROLE_DECODE, "ready", ""),
    ]
    assert topology.default_mode == common_pb2.TRANSFER_MODE_READ
    assert (topology.queued, topology.in_flight) == (0, 0)


async def test_health_follows_the_drain(pair: Any) -> None:
    """SERVING, then NOT_SERVING and DRAINING for new requests; an open one is completed."""
    deployment, _, decode = pair
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            yield message
            await go_on.wait()

    decode.on_decode = slow
    async with aio_channel(deployment.app.addresses.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        stub: Any = serving_pb2_grpc.InferenceStub(channel)
        name = "pdserve.api.serving.v1.Inference"
        check = health_pb2.HealthCheckRequest(service=name)
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.Generate(ask())
        await call.read()
        await call.read()
        draining = asyncio.ensure_future(deployment.app.drain())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(ask()).read()
        assert to_error(caught.value).reason == "DRAINING"
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not draining.done()
        go_on.set()
        kinds = []
        while (event := await call.read()) is not grpc.aio.EOF:
            kinds.append(event.WhichOneof("event"))
        assert kinds[-1] == "finished"
        await draining
