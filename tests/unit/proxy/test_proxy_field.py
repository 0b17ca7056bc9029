"""Roads between the proxy and its engines that other systems' users found broken: see docs/field-failures.md."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.testing import FakeEngine
from pdserve.rpc.channel import CHANNEL_OPTIONS, aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime.listening import stop_listening

PING_S = dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] / 1000
KEEPALIVE_S = PING_S + dict(CHANNEL_OPTIONS)["grpc.http2.ping_timeout_ms"] / 1000
"""Longest that a dead connection goes unnoticed."""


class Relay:
    """Forwards TCP connections to an address, until it is told to swallow everything without a word."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.connections = 0

    async def start(self) -> str:
        """Listens; returns the `host:port`."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """As a firewall that has forgotten the connections: no byte, no reset."""
        self._open.clear()

    def restore(self) -> None:
        """Forwards again, but nothing that was open before."""
        for writer in self._writers:
            writer.transport.abort()
        self._open.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: the connection is ours to close at once, not a turn later.
        self._writers.append(writer)
        self._tasks.append(asyncio.create_task(self._serve(reader, writer)))
        self.connections += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from either side until one ends."""
        host, _, port = self._target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
            self._writers.append(back)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, back))
                both.create_task(self._pump(there, writer))
        except* OSError:
            pass  # either side hung up, or nobody is there
        finally:
            writer.close()

    async def aclose(self) -> None:
        """Hangs up on all; the proxy connects again whenever it is hung up on, also now."""
        if self._server is not None:
            await stop_listening(self._server)
        self.restore()
        await asyncio.wait_for(asyncio.gather(*self._tasks), KEEPALIVE_S)
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            raise ConnectionResetError
        finally:
            writer.close()


@asynccontextmanager
async def relayed(engine: FakeEngine) -> AsyncIterator[tuple[Relay, str]]:
    """A relay before an engine, and its address."""
    relay = Relay(engine.address)
    try:
        yield relay, await relay.start()
    finally:
        await relay.aclose()


async def ask(deployment: Any) -> str:
    """How one request ends: the last event's kind, or the error's reason."""
    async with aio_channel(deployment.app.addresses.grpc) as channel:
        stub: Any = serving_pb2_grpc.InferenceStub(channel)
        request = serving_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(max_tokens=2))
        try:
            events = [event async for event in stub.Generate(request, timeout=5)]
        except grpc.aio.AioRpcError as error:
            return to_error(error).reason
    return str(events[-1].WhichOneof("event"))


async def gone(deployment: Any, engine_id: str) -> None:
    """Waits until the proxy has evicted an engine, at most twice keepalive's time."""
    for _ in range(int(2 * KEEPALIVE_S / 0.02)):
        if deployment.app.registry.get(engine_id) is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("an engine that cannot be reached is still routed to")


async def registered(deployment: Any, engine: FakeEngine, address: str) -> None:
    """Registers an engine under another address than its own."""
    reply = await engine.register(deployment.app.addresses.registration, grpc_address=address)
    assert reply.ok, reply


async def test_a_connection_that_dies_while_it_is_idle(deploy: Any) -> None:
    """Nothing is asked, and the road to decode swallows every byte meanwhile: the proxy knows before a request does.
    When the road is there again, the engine's next beat brings it back and the next request is answered."""
    deployment = await deploy()
    await deployment.engine("prefill")
    decode = FakeEngine("decode", deployment.signer, deployment.handovers)
    await decode.start()
    async with relayed(decode) as (relay, address):
        await registered(deployment, decode, address)
        await deployment.routable(decode)
        assert await ask(deployment) == "finished"
        relay.silence()
        await gone(deployment, decode.engine_id)
        assert await ask(deployment) == "NO_ENGINES"
        relay.restore()
        assert (await decode.beat(grpc_address=address)).ok
        await deployment.routable(decode)
        assert await ask(deployment) == "finished"
        assert relay.connections > 1
        await decode.stop()


async def test_an_idle_connection_lives(deploy: Any) -> None:
    """Keepalive's own pings are not too many for a service: after five of them the connection is the first one."""
    deployment = await deploy()
    await deployment.engine("prefill")
    decode = FakeEngine("decode", deployment.signer, deployment.handovers)
    await decode.start()
    async with relayed(decode) as (relay, address):
        await registered(deployment, decode, address)
        await deployment.routable(decode)
        await asyncio.sleep(5 * PING_S + 1)
        assert await ask(deployment) == "finished"
        assert relay.connections == 1
        await decode.stop()


async def test_an_advertised_address_that_nobody_can_reach(deploy: Any) -> None:
    """It is listed with the reason, no request goes there or waits for it, and the others' requests are served."""
    deployment = await deploy()
    await deployment.engine("prefill")
    lost = FakeEngine("decode", deployment.signer, deployment.handovers)
    await lost.start()
    await registered(deployment, lost, "192.0.2.1:9")  # set aside for documentation: no route leads there
    assert await ask(deployment) == "NO_ENGINES"
    entry = deployment.app.registry.get(lost.engine_id)
    assert entry.excluded_because() == "no gRPC connection to 192.0.2.1:9"
    await deployment.engine("decode")
    assert await ask(deployment) == "finished"
    assert not lost.decodes
    await lost.stop()
