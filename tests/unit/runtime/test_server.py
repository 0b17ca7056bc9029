"""A server answers health and reflection, keeps its ports to itself, and cleans up after calls."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import ConfigError, Draining, Overloaded, PdserveError, RequestCancelled, Unavailable
from pdserve.rpc.status import to_error
from pdserve.runtime.calls import Calls
from pdserve.runtime.server import Server

NAME = "pdserve.api.prefill.v1.Prefill"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Work:
    """One call's work, under the test's control."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.cleaning = asyncio.Event()
        self.may_clean = asyncio.Event()
        self.may_clean.set()
        self.cleaned = asyncio.Event()

    async def run(self) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """One event, then `go`, then the error or the end."""
        try:
            self.begun.set()
            yield prefill_pb2.PrefillResponse(ready=prefill_pb2.Ready(ticket=b"t"))
            await self.go.wait()
            if self.error:
                raise self.error
            yield prefill_pb2.PrefillResponse(released=prefill_pb2.Released())
        finally:
            self.cleaning.set()
            await self.may_clean.wait()
            self.cleaned.set()


class Servicer(prefill_pb2_grpc.PrefillServicer):
    """Answers every call with the same work."""

    def __init__(self, calls: Calls, work: Work) -> None:
        self.calls, self.work = calls, work

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See Work."""
        async for event in self.calls.stream(context, self.work.run()):
            yield event


class World:
    """A real loopback server with one servicer."""

    def __init__(self) -> None:
        self.calls, self.work = Calls(), Work()
        self.server = Server([NAME])
        prefill_pb2_grpc.add_PrefillServicer_to_server(Servicer(self.calls, self.work), self.server.grpc)
        self.port = self.server.bind("127.0.0.1", 0)
        self.channel = aio_channel(f"127.0.0.1:{self.port}")
        self.stub = prefill_pb2_grpc.PrefillStub(self.channel)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Served and closed."""
    world = World()
    await world.server.start()
    yield world
    world.work.may_clean.set()
    await world.channel.close()
    await world.server.stop()
    await world.calls.aclose()
    assert len(world.calls) == 0


async def health(channel: grpc.aio.Channel, name: str) -> int:
    """What grpc.health.v1 says."""
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(answer.status)


async def test_health_follows_readiness(world: World) -> None:
    """NOT_SERVING at start, SERVING when told, for the server and each service."""
    for ready, status in ((None, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        if ready is not None:
            await world.server.serving(ready)
        assert [await health(world.channel, name) for name in ("", NAME)] == [status, status]


async def test_health_can_be_watched(world: World) -> None:
    """A watcher is told of each change, the last when the server stops, and does not keep it from stopping."""
    watch = health_pb2_grpc.HealthStub(world.channel).Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=20)
    assert (await watch.read()).status == NOT_SERVING
    await world.server.serving(True)
    assert (await watch.read()).status == SERVING
    stop = asyncio.create_task(world.server.stop(1.0))
    assert (await watch.read()).status == NOT_SERVING
    await asyncio.wait_for(stop, 5)


async def test_reflection_lists_the_services(world: World) -> None:
    """An operator with grpcurl needs no .proto."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(world.channel).ServerReflectionInfo(iter([request]), timeout=5)
    answer = await anext(aiter(call))
    assert {NAME, "grpc.health.v1.Health"} <= {service.name for service in answer.list_services_response.service}
    call.cancel()


async def test_a_taken_port_is_a_config_error(world: World) -> None:
    """Never shared in silence."""
    other = Server([NAME])
    with pytest.raises(ConfigError, match="cannot bind"):
        other.bind("127.0.0.1", world.port)
    await other.stop()


async def test_a_unix_socket_is_ours_alone(tmp_path: Path) -> None:
    """Only this user opens it; a living listener's is refused, a dead one's is replaced."""
    path = tmp_path / "s.sock"
    first, second, third = Server([NAME]), Server([NAME]), Server([NAME])
    first.bind_unix(path)
    await first.start()
    assert path.stat().st_mode & 0o777 == 0o600
    async with aio_channel(f"unix:{path}") as channel:
        assert await health(channel, NAME) == NOT_SERVING
    with pytest.raises(ConfigError, match="another process listens"):
        second.bind_unix(path)
    await first.stop()
    third.bind_unix(path)
    for server in (second, third):
        await server.stop()
    with pytest.raises(ConfigError, match="bytes"):
        Server([NAME]).bind_unix(tmp_path / ("x" * 120))


async def read(call: Any) -> list[str]:
    """The events of a call that are left, by name."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event.WhichOneof("event"))
    return events


async def test_a_call_streams_what_its_work_yields(world: World) -> None:
    """And ends with it."""
    world.work.go.set()
    assert await read(world.stub.Prefill(prefill_pb2.PrefillRequest(), timeout=5)) == ["ready", "released"]
    await asyncio.wait_for(world.work.cleaned.wait(), 5)


@pytest.mark.parametrize(
    ("error", "kind"), [(Overloaded("full"), Overloaded), (KeyError("odd"), PdserveError)], ids=["typed", "odd"]
)
async def test_a_call_ends_with_the_error_of_its_work(world: World, error: Exception, kind: type[Exception]) -> None:
    """Typed as it was, also after events; anything else is INTERNAL and in the log."""
    world.work.error = error
    with capture_logs() as logs:
        call = world.stub.Prefill(prefill_pb2.PrefillRequest(), timeout=5)
        await call.read()
        world.work.go.set()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert type(to_error(raised.value)) is kind
    assert ("unexpected_error" in [line["event"] for line in logs]) == isinstance(error, KeyError)


@pytest.mark.parametrize("how", ["cancel", "channel", "deadline"])
async def test_work_ends_with_its_call(world: World, how: str) -> None:
    """However the caller leaves, the work is cancelled and cleans up, beyond the call's own end."""
    world.work.may_clean.clear()
    call = world.stub.Prefill(prefill_pb2.PrefillRequest(), timeout=1.0 if how == "deadline" else 30)
    await call.read()
    if how == "cancel":
        call.cancel()
    elif how == "channel":
        await world.channel.close()
    await asyncio.wait_for(world.work.cleaning.wait(), 5)
    assert len(world.calls) == 1
    drain = asyncio.create_task(world.calls.drain())
    await asyncio.sleep(0)
    assert not drain.done()
    world.work.may_clean.set()
    await asyncio.wait_for(drain, 5)
    assert world.work.cleaned.is_set()


async def test_stopping_ends_calls_with_draining(world: World) -> None:
    """A caller whose work is stopped learns that another service may take it."""
    call = world.stub.Prefill(prefill_pb2.PrefillRequest(), timeout=30)
    await call.read()
    await world.calls.aclose()
    assert world.work.cleaned.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert isinstance(to_error(raised.value), Draining)


class SlowCall:
    """A call whose caller has not read everything yet."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None], /) -> None:
        """See grpc.aio.ServicerContext."""
        self.callbacks.append(callback)

    def end(self) -> None:
        """The status is out."""
        for callback in self.callbacks:
            callback(self)


async def test_a_drain_waits_until_the_callers_have_everything() -> None:
    """Work that has ended may still have its last words on the way to its caller."""
    calls, work, call = Calls(), Work(), SlowCall()
    work.go.set()
    assert len([event async for event in calls.stream(call, work.run())]) == 2
    await asyncio.wait_for(calls.idle(), 5)
    drain = asyncio.create_task(calls.drain())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not drain.done()
    call.end()
    await asyncio.wait_for(drain, 5)


async def test_a_server_stop_cancels_calls_and_their_work(world: World) -> None:
    """The second stage: nothing is waited for but the cleaning up."""
    call = world.stub.Prefill(prefill_pb2.PrefillRequest(), timeout=30)
    await call.read()
    await world.server.stop()
    await world.calls.aclose()
    assert world.work.cleaned.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert isinstance(to_error(raised.value), RequestCancelled | Unavailable)


async def test_draining_refuses_new_work() -> None:
    """By a typed, retryable error."""
    calls = Calls()
    calls.check_open()
    await calls.drain()
    with pytest.raises(Draining):
        calls.check_open()
