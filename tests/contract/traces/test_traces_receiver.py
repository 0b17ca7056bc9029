"""The OTLP receiver: what it takes, what it refuses and how, and what it does when its disk does not take it."""

import asyncio
import sqlite3
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from pdserve.rpc.channel import aio_channel
from pdserve.traces.writing import Writer
from tests.contract.traces.conftest import WAIT, Rig
from tests.unit.traces import made


async def test_what_is_not_taken_is_said(rig: Rig) -> None:
    """A partial success counts what was refused and says why; the rest is stored, and nothing refused means no word."""
    assert not (await rig.export(made.failed(1))).HasField("partial_success")
    trace = made.request(2)
    trace.spans[made.KVD][0].span_id = b"short"
    answer = await rig.export(trace)
    assert answer.partial_success.rejected_spans == 1
    assert "span_id is not 8 bytes" in answer.partial_success.error_message
    found = await rig.get(f"/api/traces/{trace.hex}")
    assert len(found["data"][0]["spans"]) == trace.count - 1
    assert (rig.app.receiver.stored, rig.app.receiver.refused.total()) == (2 + trace.count - 1, 1)


async def test_an_export_that_is_too_large_is_refused(rig: Rig) -> None:
    """Before it is read into memory as a message, with RESOURCE_EXHAUSTED; the next one is taken."""
    large = made.Made(1)
    large.span("x", made.KVD, 0, 1, big="y" * (5 << 20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.export(large)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await rig.export(made.request(2))


async def test_more_than_can_wait_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the disk standing still, a few exports wait and the others get RESOURCE_EXHAUSTED; when it goes on, those
    that waited are stored, and there is room again."""
    stand, add = asyncio.Event(), rig.app.receiver._store.add
    arrived: asyncio.Queue[None] = asyncio.Queue()

    async def standing(spans: object) -> object:
        arrived.put_nowait(None)
        await stand.wait()
        return await add(spans)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.app.receiver._store, "add", standing)
    rig.app.receiver._room = 3 * made.request(1).export().ByteSize()
    calls = [asyncio.create_task(rig.export(made.request(n))) for n in range(3)]
    for _ in calls:
        await asyncio.wait_for(arrived.get(), WAIT)
    with pytest.raises(grpc.aio.AioRpcError, match="wait to be stored") as caught:
        await rig.export(made.request(4))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stand.set()
    await asyncio.gather(*calls)
    await rig.export(made.request(5))
    assert len((await rig.get("/api/pdserve/requests"))["requests"]) == 4
    assert rig.app.receiver._pending == 0


async def test_a_full_disk_is_not_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is told UNAVAILABLE, so that it tries again; reading goes on, and so does writing later."""

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "add", full)
        with pytest.raises(grpc.aio.AioRpcError, match="disk is full") as caught:
            await rig.export(made.request(1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await rig.get("/api/services"))["data"] == []
    await rig.export(made.request(1))
    assert len((await rig.get("/api/services"))["data"]) == 4


async def test_bytes_that_are_no_message_are_refused(rig: Rig) -> None:
    """As INVALID_ARGUMENT, not as a fault of the store."""
    async with aio_channel(rig.app.addresses.otlp) as channel:
        call: Any = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff", timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_says_that_it_serves(rig: Rig) -> None:
    """grpc.health on the OTLP port is what `pdserve up` waits for; a drain says the opposite."""
    async with aio_channel(rig.app.addresses.otlp) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await rig.app.drain()
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.export(made.request(1))


async def test_the_loop_goes_on_while_much_is_stored(rig: Rig) -> None:
    """Ten thousand spans do not keep other answers waiting: decoding and storing are in threads."""
    spans = [span for n in range(400) for group in made.request(n).spans.values() for span in group]
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])
    loop, longest = asyncio.get_running_loop(), 0.0
    export = asyncio.ensure_future(rig.export_method(request, timeout=WAIT))
    answered = 0
    while not export.done():
        begun = loop.time()
        await asyncio.sleep(0)
        longest = max(longest, loop.time() - begun)
        if answered < 3:
            await rig.get("/api/services")
            answered += 1
    assert not (await export).HasField("partial_success")
    print(f"longest turn of the loop {longest:.3f} s, {len(spans)} spans, {request.ByteSize()} bytes")
    assert answered == 3, "the store answered while the export was under way"
