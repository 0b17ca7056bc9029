"""Measures the ways to this node's memory: within the node, and from each peer. Bounded in time and in memory; nothing
stays held."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Final

import structlog

from pdserve.kvd.peers.lending import Borrowed
from pdserve.kvd.plan import Runs
from pdserve.kvd.probing.accelerators import Accelerators
from pdserve.kvd.probing.device_scratch import OpenScratch, device_scratch
from pdserve.kvd.probing.gpus import read_gpus
from pdserve.kvd.probing.listeners import guarded, read_listeners
from pdserve.kvd.probing.measuring import Landed
from pdserve.kvd.probing.scratch import SCRATCH_BYTES, landed, scratch
from pdserve.kvd.probing.slot import Slot, whole
from pdserve.kvd.probing.timing import Timing
from pdserve.kvd.probing.values import Device, Gpus, Listener, Measured, Report, Way
from pdserve.kvd.probing.ways import left_out, way
from pdserve.kvd.reaching import forget, reaching
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import Capabilities, MappedRegion, RemoteRegion, Transport
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import DeadlinePassed, PdserveError, Unavailable

log = structlog.get_logger(__name__)

_ELSEWHERE: Final = "device memory is measured within a node only"

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
    gpus: Callable[[], Gpus] = read_gpus
    """As `devices`."""
    open_scratch: OpenScratch = device_scratch
    """Memory of devices."""


class Survey:
    """See the module."""

    def __init__(self, slot: Slot, around: Surroundings) -> None:
        self._slot = slot
        self._around = around

    async def measure(self, peers: Sequence[str], seconds: float) -> Report:
        """Measures within this node and from each peer, by address, for so many seconds at most.

        Raises:
            Overloaded: something is measured already, here or by another daemon that reads from here.
            Unavailable: the daemon stops.
        """
        task = self._slot.take("measures", lambda: _Measurement(self._around, seconds).all(peers))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("this kvd stops") from None
            task.cancel()  # who asked is gone; it ends in its own time, and the slot is taken until then
            raise


class _Measurement:
    """One."""

    def __init__(self, around: Surroundings, seconds: float) -> None:
        self._around = around
        self._began = around.now()
        self._deadline = self._began + seconds
        self._reaching = reaching(around.transports)
        self._timing = Timing(around.now, self._look)
        self._accelerators = Accelerators(around.transports, around.open_scratch, self._timing, SCRATCH_BYTES)
        self._in_use = set(around.kinds())
        self._left_out: Mapping[str, str] = {}
        self._listeners: dict[Listener, None] = {}

    async def all(self, peers: Sequence[str]) -> Report:
        """Peers before this node's devices, which wait for a process to start."""
        around = self._around
        devices, gpus = await asyncio.to_thread(lambda: (around.devices(), around.gpus()))
        names = [one.capabilities.name for one in around.transports]
        self._left_out = left_out(names, gpus=bool(gpus.devices))
        within, between = await self._host(), list[Way]()
        for peer in peers:
            between += await self._between(peer)
        for kind in sorted(self._in_use | self._accelerators.kinds(), key=lambda kind: kind.value):
            if kind is not MemoryKind.HOST:
                needed = kind in self._in_use
                within += await self._accelerators.ways(kind, self._left_out, self._deadline, needed=needed)
        await self._look()
        took = around.now() - self._began
        log.info("measured", peers=list(peers), seconds=round(took, 3))
        shown = (*devices, *gpus.devices)
        return Report((*within, *between), shown, SCRATCH_BYTES, took, tuple(self._listeners), gpus.links)

    async def _host(self) -> list[Way]:
        """Within this node, where engines have host memory, or none has any yet."""
        around, found, seed = self._around, dict[str, Measured](), random.getrandbits(64)
        if MemoryKind.HOST not in self._kinds():
            return []
        try:
            async with (
                scratch(around.arena, SCRATCH_BYTES, seed) as src,
                scratch(around.arena, SCRATCH_BYTES, None) as dst,
            ):
                for transport in around.transports:
                    can = transport.capabilities
                    if can.same_node and MemoryKind.HOST in can.kinds:
                        opening = transport.open(src, dst)
                        right = self._right(dst, seed)
                        found[can.name] = await self._timing.timed(opening, dst.size, right, self._deadline)
                        await whole(forget(self._reaching, src))
        except PdserveError as error:
            return [Way("", MemoryKind.HOST, error=error.message, reason=error.reason)]
        return [way("", MemoryKind.HOST, self._able, None, found, self._left_out)]

    async def _between(self, peer: str) -> list[Way]:
        around, found = self._around, dict[str, Measured]()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._timing.left(self._deadline)):
                    borrowed = await stack.enter_async_context(around.borrow(peer, SCRATCH_BYTES))
                    dst = await stack.enter_async_context(scratch(around.arena, SCRATCH_BYTES, None))
                offer = borrowed.offer
                right = self._right(dst, offer.seed)
                for name, card in offer.cards.items() if MemoryKind.HOST in self._kinds() else ():
                    if name in self._reaching:
                        src = RemoteRegion(RegionKey("scratch there", 0), MemoryKind.HOST, offer.nbytes, card)
                        opening = self._reaching[name].reach(src, dst)
                        found[name] = await self._timing.timed(opening, dst.size, right, self._deadline)
        except TimeoutError:
            return [Way(peer, MemoryKind.HOST, error="there was no time left", reason=DeadlinePassed.reason)]
        except PdserveError as error:
            return [Way(peer, MemoryKind.HOST, error=error.message, reason=error.reason)]
        return [self._from(peer, kind, borrowed, found) for kind in self._kinds()]

    def _from(self, peer: str, kind: MemoryKind, borrowed: Borrowed, found: Mapping[str, Measured]) -> Way:
        host = kind is MemoryKind.HOST
        made = way(peer, kind, self._able, borrowed.offer, found if host else {}, self._left_out)
        return replace(
            made,
            node=borrowed.peer.node,
            epoch=borrowed.peer.epoch,
            devices_there=tuple(borrowed.offer.devices),
            not_measured="" if host or made.error else _ELSEWHERE,
        )

    def _kinds(self) -> list[MemoryKind]:
        """The kinds of memory that engines have here; host memory where there is no engine yet."""
        return sorted(self._in_use, key=lambda kind: kind.value) or [MemoryKind.HOST]

    @property
    def _able(self) -> list[Capabilities]:
        return [one.capabilities for one in self._around.transports]

    def _right(self, dst: MappedRegion, seed: int) -> Landed:
        async def right(runs: Runs) -> bool:
            return landed(self._around.arena, dst, runs, seed)

        return right

    async def _look(self) -> None:
        """At what the processes listen that run now: some end with a session."""
        for process in guarded(self._around.transports):
            self._listeners.update(dict.fromkeys(await asyncio.to_thread(read_listeners, *process)))
