"""A TCP relay that a test can cut, hold and slow down: the cable between two daemons."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class Wire:
    """Listens and passes bytes on to `target`, on one host; `async with` opens and ends it.

    `delay`: seconds that each piece takes, each way; it takes effect at once.
    """

    def __init__(self, target: int = 0, delay: float = 0.0, host: str = "127.0.0.1", port: int = 0) -> None:
        """`target`: a port of `host`; may be set later. `port`: its own; 0 takes a free one."""
        self.target = target
        self._host = host
        self._port = port
        self.delay = delay
        self.calls = 0
        """Connections that came."""
        self._whole = True
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """`host:port` of this end."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def cut(self) -> None:
        """Breaks what is open, and refuses what comes, until `mend`."""
        self._whole = False
        for end in list(self._ends):
            end.transport.abort()

    def mend(self) -> None:
        """Lets new connections through."""
        self._whole = True

    def hold(self) -> None:
        """Swallows what comes, as a link that is down: nobody hears of it. Until `let`, when it comes through."""
        self._flows.clear()

    def let(self) -> None:
        """Passes on what was held."""
        self._flows.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._ends.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self._whole:
                back, there = await asyncio.open_connection(self._host, self.target)
                self._ends.add(there)
                await asyncio.gather(self._pass(reader, there), self._pass(back, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one of its ends is gone, and so the other goes; or the wire is, whose task this is
        finally:
            for end in (writer, there):
                if end is not None:
                    self._ends.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            while data := await reader.read(_CHUNK):
                pieces.put_nowait((loop.time() + self.delay, data))
            pieces.put_nowait((loop.time() + self.delay, b""))

        taking = asyncio.create_task(take())
        try:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._flows.wait()
                if not data:
                    raise ConnectionResetError
                writer.write(data)
                await writer.drain()
        finally:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await taking
