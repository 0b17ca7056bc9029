"""A scripted kvd: real gRPC over a Unix socket, and no daemon behind it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc


class ScriptedKvd(kvd_pb2_grpc.KvdServicer):
    """Welcomes every hello; the test reads what came and says what goes out."""

    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self.epoch = "epoch-1"
        self.lease_ms = 30_000
        self.refuse: tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]] | None = None
        self.silent = False
        self.received: asyncio.Queue[kvd_pb2.AttachRequest] = asyncio.Queue()
        self.hellos: asyncio.Queue[kvd_pb2.Hello] = asyncio.Queue()
        self._streams: set[asyncio.Queue[kvd_pb2.AttachResponse | None]] = set()
        self._server: grpc.aio.Server | None = None

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[kvd_pb2.AttachResponse]:
        first = await anext(aiter(requests))
        self.hellos.put_nowait(first.hello)
        if self.refuse is not None:
            await context.abort(*self.refuse)
        if self.silent:
            await asyncio.Event().wait()
        out: asyncio.Queue[kvd_pb2.AttachResponse | None] = asyncio.Queue()
        self._streams.add(out)
        reader = asyncio.create_task(self._read(requests))
        try:
            yield kvd_pb2.AttachResponse(
                welcome=kvd_pb2.Welcome(
                    kvd_epoch=self.epoch,
                    notice_endpoint="ipc:///n",
                    lease_ms=self.lease_ms,
                    renew_ms=self.lease_ms // 3,
                    fence_ms=5000,
                )
            )
            while (message := await out.get()) is not None:
                yield message
        finally:
            self._streams.discard(out)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            self.received.put_nowait(message)

    def say(self, **message: Any) -> None:
        """Sends one message to everybody."""
        for stream in self._streams:
            stream.put_nowait(kvd_pb2.AttachResponse(**message))

    def hang_up(self) -> None:
        """Ends every stream; the server goes on."""
        for stream in list(self._streams):
            stream.put_nowait(None)

    async def next(self, kind: str) -> Any:
        """The next message; it must be of this kind."""
        async with asyncio.timeout(20):
            message = await self.received.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def start(self) -> None:
        self._server = grpc.aio.server()
        kvd_pb2_grpc.add_KvdServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            self.hang_up()
            await self._server.stop(0)
            self._server = None


@pytest.fixture
async def kvd(tmp_path: Path) -> AsyncIterator[ScriptedKvd]:
    """A scripted kvd that is up."""
    scripted = ScriptedKvd(tmp_path / "kvd.sock")
    await scripted.start()
    yield scripted
    await scripted.stop()
