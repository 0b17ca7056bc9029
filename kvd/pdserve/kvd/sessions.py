"""Open sessions by pair of regions: made once, cached, and closed with either region."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from pdserve.kvd.transport.choose import choose
from pdserve.kvd.transport.port import MappedRegion, Session, Transport
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import StaleEpoch

log = structlog.get_logger(__name__)

Pair = tuple[RegionKey, RegionKey]


class Sessions:
    """See the module. `region` finds a mapped region; None once it is gone."""

    def __init__(self, transports: Sequence[Transport], region: Callable[[RegionKey], MappedRegion | None]) -> None:
        """`transports` in order of preference."""
        self._transports: Mapping[str, Transport] = {t.capabilities.name: t for t in transports}
        self._region = region
        self._open: dict[Pair, asyncio.Task[tuple[Session, str]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, src: RegionKey, dst: RegionKey) -> tuple[Session, str]:
        """The session of a pair and its transport's name.

        Raises:
            StaleEpoch: a region is gone.
            TransferFailed: no transport joins the two.
        """
        pair = (src, dst)
        task = self._open.get(pair)
        if task is None:
            task = self._open[pair] = asyncio.create_task(self._make(src, dst))
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._open.get(pair) is task:
                del self._open[pair]  # a failure is not kept: the next one tries again
            raise

    async def close(self, pair: Pair) -> None:
        """Closes a pair's session; its copies are terminal then."""
        task = self._open.pop(pair, None)
        if task is not None:
            closer = asyncio.create_task(self._end(pair, task))
            self._closing.add(closer)
            closer.add_done_callback(self._closing.discard)
            await asyncio.shield(closer)

    async def close_engine(self, engine_id: str) -> None:
        """Closes every session from or to an engine."""
        pairs = [p for p in self._open if engine_id in (p[0].engine_id, p[1].engine_id)]
        await asyncio.gather(*(self.close(pair) for pair in pairs))

    async def aclose(self) -> None:
        """Closes all."""
        await asyncio.gather(*(self.close(pair) for pair in list(self._open)), *self._closing)

    async def _make(self, src: RegionKey, dst: RegionKey) -> tuple[Session, str]:
        a, b = self._region(src), self._region(dst)
        if a is None or b is None:
            raise StaleEpoch("the memory of an engine that has ended")
        name = choose([t.capabilities for t in self._transports.values()], a.kind, b.kind, same_node=True)
        session = await self._transports[name].open(a, b)
        log.info("session_opened", src=str(src), dst=str(dst), transport=name)
        return session, name

    async def _end(self, pair: Pair, task: asyncio.Task[tuple[Session, str]]) -> None:
        await asyncio.wait([task])
        if task.exception() is None:
            await task.result()[0].close()
            log.info("session_closed", src=str(pair[0]), dst=str(pair[1]))
