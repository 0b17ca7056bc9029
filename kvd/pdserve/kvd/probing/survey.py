"""Measures the ways to this node's memory: within the node, and from each peer. Bounded in time and in memory; nothing
stays held."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from pdserve.kvd.peers.lending import Borrowed
from pdserve.kvd.probing.measuring import Measuring
from pdserve.kvd.probing.scratch import SCRATCH_BYTES, landed, scratch
from pdserve.kvd.probing.slot import Slot, whole
from pdserve.kvd.probing.values import Device, Measured, Report, Way
from pdserve.kvd.probing.ways import left_out, way
from pdserve.kvd.reaching import forget, reaching
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion, Session, Transport
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import DeadlinePassed, PdserveError, Unavailable

log = structlog.get_logger(__name__)

_EACH_S: Final = 5.0
"""Longest time for the copies of one transport. That of opening it, which may start its library's process and takes
seconds then, is bounded by the survey's."""

Borrow = Callable[[str, int], AbstractAsyncContextManager[Borrowed]]
"""So many bytes of the daemon at an address; see `peers.lending.borrowed`."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a survey is made in."""

    arena: Arena
    transports: Sequence[Transport]
    """In order of preference."""
    kinds: Callable[[], Collection[MemoryKind]]
    """Of memory that engines have here."""
    borrow: Borrow
    devices: Callable[[], tuple[Device, ...]]
    """Reads those of this node; may block."""
    now: Callable[[], float]
    """Monotonic seconds."""


class Survey:
    """See the module."""

    def __init__(self, slot: Slot, around: Surroundings) -> None:
        self._slot = slot
        self._around = around
        self._reaching = reaching(around.transports)

    async def measure(self, peers: Sequence[str], seconds: float) -> Report:
        """Measures within this node and from each peer, by address, for so many seconds at most.

        Raises:
            Overloaded: something is measured already, here or by another daemon that reads from here.
            Unavailable: the daemon stops.
        """
        task = self._slot.take("measures", lambda: self._measure(peers, seconds))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("this kvd stops") from None
            task.cancel()  # who asked is gone; it ends in its own time, and the slot is taken until then
            raise

    async def _measure(self, peers: Sequence[str], seconds: float) -> Report:
        began = self._around.now()
        deadline = began + seconds
        devices = await asyncio.to_thread(self._around.devices)
        ways = [*await self._within(deadline)]
        for peer in peers:
            ways += await self._between(peer, deadline)
        log.info("measured", peers=list(peers), seconds=round(self._around.now() - began, 3))
        return Report(tuple(ways), devices, SCRATCH_BYTES, self._around.now() - began)

    async def _within(self, deadline: float) -> list[Way]:
        found: dict[str, Measured] = {}
        kinds, seed = self._in_use(), random.getrandbits(64)
        try:
            if MemoryKind.HOST in kinds:
                async with (
                    scratch(self._around.arena, SCRATCH_BYTES, seed) as src,
                    scratch(self._around.arena, SCRATCH_BYTES, None) as dst,
                ):
                    for transport in self._around.transports:
                        can = transport.capabilities
                        if can.same_node and MemoryKind.HOST in can.kinds:
                            found[can.name] = await self._timed(transport.open(src, dst), dst, seed, deadline)
                            await whole(forget(self._reaching, src))
        except PdserveError as error:
            return [Way("", MemoryKind.HOST, error=error.message, reason=error.reason)]
        return [self._way(kind, found, None) for kind in kinds]

    async def _between(self, peer: str, deadline: float) -> list[Way]:
        found: dict[str, Measured] = {}
        kinds = self._in_use()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(max(0.0, deadline - self._around.now())):
                    borrowed = await stack.enter_async_context(self._around.borrow(peer, SCRATCH_BYTES))
                    dst = await stack.enter_async_context(scratch(self._around.arena, SCRATCH_BYTES, None))
                offer = borrowed.offer
                for name, card in offer.cards.items() if MemoryKind.HOST in kinds else ():
                    if name in self._reaching:
                        src = RemoteRegion(RegionKey("scratch there", 0), MemoryKind.HOST, offer.nbytes, card)
                        opening = self._reaching[name].reach(src, dst)
                        found[name] = await self._timed(opening, dst, offer.seed, deadline)
        except TimeoutError:
            return [Way(peer, MemoryKind.HOST, error="there was no time left", reason=DeadlinePassed.reason)]
        except PdserveError as error:
            return [Way(peer, MemoryKind.HOST, error=error.message, reason=error.reason)]
        return [self._way(kind, found, borrowed, peer) for kind in kinds]

    async def _timed(
        self, opening: Coroutine[Any, Any, Session], dst: MappedRegion, seed: int, deadline: float
    ) -> Measured:
        """Measures one session, and closes it."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._around.now())):
                session = await opening
        except TimeoutError:
            return Measured(error="it was not open in time")
        except PdserveError as error:
            return Measured(error=error.message)
        try:
            return await Measuring(
                session,
                dst.size,
                lambda runs: landed(self._around.arena, dst, runs, seed),
                random.getrandbits(32),
                self._around.now,
                min(deadline, self._around.now() + _EACH_S),
            ).measure()
        finally:
            await whole(session.close())  # its copies write to what is unmapped next

    def _in_use(self) -> list[MemoryKind]:
        """The kinds of memory that engines have here; host memory where there is no engine yet."""
        return sorted(self._around.kinds(), key=lambda kind: kind.value) or [MemoryKind.HOST]

    def _way(self, kind: MemoryKind, found: Mapping[str, Measured], borrowed: Borrowed | None, peer: str = "") -> Way:
        able = [t.capabilities for t in self._around.transports]
        names = [one.name for one in able]
        if borrowed is None:
            return way(peer, kind, able, None, found, left_out(names))
        there, offer = borrowed.peer, borrowed.offer
        made = way(peer, kind, able, offer, found, left_out(names))
        return replace(made, node=there.node, epoch=there.epoch, devices_there=tuple(offer.devices))
