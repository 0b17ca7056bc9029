"""Open sessions by pair of regions: made once, cached, and closed with either region. The region that is filled is
always this node's; the other may be another's.

    get ──▶ opening ──▶ open ──▶ closing ──▶ gone
               │          └─ over by itself: the next `get` closes it and opens another
               └─ failed, or closed meanwhile: the next `get` opens another

A session with another node may be over by itself. An operation that met that tells `failed` of it: then the card that
led there is given up, and the next session waits for the one that the other node sends on hearing of the failure.
A pair has at most one session that is opening or open; one that closes may be beside it. Engine ids are
epochs, so no session is ever taken for that of a restarted engine.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import structlog

from pdserve.kvd.peers.guests import FarRegion
from pdserve.kvd.transport.choose import choose
from pdserve.kvd.transport.port import FarSession, MappedRegion, Reaching, RemoteRegion, Session, Transport
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import StaleEpoch, TransferFailed

log = structlog.get_logger(__name__)

Pair = tuple[RegionKey, RegionKey]


class FarRegions(Protocol):
    """The memory of other nodes; see `Guests`."""

    async def far(self, key: RegionKey) -> FarRegion:
        """A region, when its card has come. Raises StaleEpoch where there is none."""
        ...

    def stale(self, far: FarRegion) -> None:
        """Its card leads nowhere, and an operation fails for that."""
        ...


@dataclass(frozen=True, slots=True)
class _Open:
    session: Session
    transport: str
    mortal: FarSession | None = None
    """The session, where it may end by itself."""
    far: FarRegion | None = None
    """What it was reached by, on another node."""


_Opening = asyncio.Task[_Open]


class Sessions:
    """See the module. `region` finds a mapped region; None once it is gone. `far` finds other nodes'."""

    def __init__(
        self,
        transports: Sequence[Transport],
        region: Callable[[RegionKey], MappedRegion | None],
        far: FarRegions | None = None,
    ) -> None:
        """`transports` in order of preference."""
        self._transports: Mapping[str, Transport] = {t.capabilities.name: t for t in transports}
        self._region = region
        self._far = far
        self._open: dict[Pair, _Opening] = {}
        self._closing: dict[asyncio.Task[None], Pair] = {}
        self._stopped = False

    async def get(self, src: RegionKey, dst: RegionKey) -> tuple[Session, str]:
        """The session of a pair and its transport's name. A caller that is cancelled leaves the session alone.

        Raises:
            StaleEpoch: a region is gone.
            TransferFailed: kvd stops, no transport joins the two, or the session was closed while it opened.
        """
        if self._stopped:
            raise TransferFailed("this kvd stops")
        pair = (src, dst)
        task = self._open.get(pair)
        if task is not None and _over(task):
            self._retire(pair)
            task = None
        if task is None:
            task = self._open[pair] = asyncio.create_task(self._make(src, dst))
            task.add_done_callback(lambda made: self._made(pair, made))
        if not task.done():  # it is, but for a pair's first copies
            await asyncio.wait([task])
        if task.cancelled():
            raise TransferFailed("the session was closed while it was being opened")
        made = task.result()
        return made.session, made.transport

    def failed(self, pair: Pair) -> None:
        """An operation of a pair has failed, and whoever posted it hears so. Where that was the end of its session,
        the next one is reached by another card."""
        task = self._open.get(pair)
        if task is None or not _over(task):
            return
        log.warning("session_over", src=str(pair[0]), dst=str(pair[1]), transport=task.result().transport)
        self._retire(pair)
        self._stale(task.result().far)

    async def close(self, pair: Pair) -> None:
        """Closes a pair's session, also one that is being opened or closed already; its copies are terminal then."""
        self._retire(pair)
        closers = [closer for closer, closing in self._closing.items() if closing == pair]
        await asyncio.gather(*(asyncio.shield(closer) for closer in closers))

    async def close_engine(self, engine_id: str) -> None:
        """Closes every session from or to an engine."""
        await self._close_all(p for p in self._pairs() if engine_id in (p[0].engine_id, p[1].engine_id))

    async def aclose(self) -> None:
        """Closes all, and opens no more: nobody would close it."""
        self._stopped = True
        await self._close_all(self._pairs())

    def _retire(self, pair: Pair) -> None:
        task = self._open.pop(pair, None)
        if task is not None:
            closer = asyncio.create_task(self._end(pair, task))
            self._closing[closer] = pair
            closer.add_done_callback(self._closed)

    def _stale(self, far: FarRegion | None) -> None:
        if far is not None and self._far is not None:
            self._far.stale(far)

    def _pairs(self) -> set[Pair]:
        return {*self._open, *self._closing.values()}

    async def _close_all(self, pairs: Iterable[Pair]) -> None:
        await asyncio.gather(*[self.close(pair) for pair in pairs])

    async def _make(self, src: RegionKey, dst: RegionKey) -> _Open:
        a, b = self._region(src), self._region(dst)
        if b is None or (a is None and self._far is None):
            raise StaleEpoch("the memory of an engine that has ended")
        if a is None:
            return await self._reach(src, b)
        name = choose([t.capabilities for t in self._transports.values()], a.kind, b.kind, same_node=True)
        session = await self._transports[name].open(a, b)
        log.info("session_opened", src=str(src), dst=str(dst), transport=name)
        return _Open(session, name, session if isinstance(session, FarSession) else None)

    async def _reach(self, src: RegionKey, dst: MappedRegion) -> _Open:
        assert self._far is not None
        far = await self._far.far(src)
        able = [t.capabilities for t in self._transports.values()]
        name = choose(able, far.region.kind, dst.kind, same_node=False, offered=far.cards)
        transport = cast("Reaching", self._transports[name])
        remote = RemoteRegion(src, far.region.kind, far.region.size, far.cards[name])
        try:
            session = await transport.reach(remote, dst)
        except TransferFailed:
            self._stale(far)
            raise
        log.info("session_opened", src=str(src), dst=str(dst.key), transport=name, other_node=True)
        return _Open(session, name, session, far)

    def _made(self, pair: Pair, task: _Opening) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._open.get(pair) is task:
            del self._open[pair]  # a failure is not kept: the next one tries again

    def _closed(self, closer: asyncio.Task[None]) -> None:
        src, dst = self._closing.pop(closer)
        # Also for whoever waited for it: a caller that was cancelled hears nothing.
        if not closer.cancelled() and (error := closer.exception()) is not None:
            log.error("session_not_closed", src=str(src), dst=str(dst), exc_info=error)

    async def _end(self, pair: Pair, task: _Opening) -> None:
        task.cancel()  # an opening that hangs must not keep a fence for ever; one that is done stays done
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await task.result().session.close()
            log.info("session_closed", src=str(pair[0]), dst=str(pair[1]))


def _over(task: _Opening) -> bool:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return False
    mortal = task.result().mortal
    return mortal is not None and mortal.over
