"""A link with a bandwidth, a delay and faults, that really copies the bytes.

One serial queue, like a NIC: a copy of n bytes occupies the link for n / bandwidth seconds, and its
bytes are in place, and it is terminal, a delay later. Overlap with computing can so be measured. Other nodes are
daemons of this same host, whose memory is read where it lies.
"""

import asyncio
import enum
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.transport import vm
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved, RemoteRegion
from pdserve.kvd.transport.shm import check_runs
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed
from pdserve.runtime.clock import boot_id
from pdserve.runtime.failpoints import Point, failpoint


class Fault(enum.Enum):
    """What may be wrong with one copy."""

    FAIL = "fail"
    """It ends with TransferFailed after half of its bytes."""
    STALL = "stall"
    """It never ends by itself; neither does `cancel` end it, only the session's close."""
    COPY_NOTHING = "copy_nothing"
    """It says that it moved everything, and moved nothing."""
    WRONG_BLOCK = "wrong_block"
    """It takes each run from where the next one begins."""


@dataclass(slots=True)
class FaultPlan:
    """Faults by hand: `script` is used up copy by copy, None in it leaves one alone."""

    script: list[Fault | None] = field(default_factory=list)

    def next(self) -> Fault | None:
        """The fault of the next copy."""
        return self.script.pop(0) if self.script else None


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies: an address of a process of a host."""

    boot_id: str
    pid: int
    born: int
    """See vm.born: a pid alone may be another process by now."""
    address: int


_cards = msgspec.msgpack.Decoder(_Card)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a session copies from: offsets into `region` begin at `base`; `read` copies (dst, src, length)."""

    region: MappedRegion | RemoteRegion
    base: int
    read: Callable[[Offsets, Offsets, Offsets], object]


class SimTransport:
    """See the module. `sleep` is asyncio's, or a test's."""

    capabilities: Final = Capabilities("sim", frozenset(MemoryKind), same_node=True, other_node=True)

    def __init__(
        self,
        arena: Arena,
        bandwidth: float,
        delay: float = 0.0,
        faults: FaultPlan | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`bandwidth` in bytes a second, `delay` in seconds."""
        self._arena = arena
        self.bandwidth = bandwidth
        self.delay = delay
        self.faults = faults or FaultPlan()
        self._sleep = sleep
        self._link = asyncio.Lock()

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "SimSession":
        """See port.Transport."""
        return SimSession(self, Source(src, src.offset, self._arena.move), dst)

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        pid = os.getpid()
        return msgspec.msgpack.encode(_Card(boot_id(), pid, vm.born(pid), self._arena.address(region.offset)))

    async def forget(self, region: MappedRegion) -> None:
        """See port.Reaching."""

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> "SimSession":
        """See port.Reaching."""
        try:
            card = _cards.decode(src.card)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"not a card of sim: {error}") from error
        if card.boot_id != boot_id():
            raise TransferFailed("sim reaches other daemons of this host only")

        def read(to: Offsets, at: Offsets, length: Offsets) -> None:
            try:
                if vm.born(card.pid) != card.born:
                    raise TransferFailed("the other daemon is gone")
                vm.read(card.pid, to + np.uint64(self._arena.address(0)), at, length)
            except OSError as error:
                raise TransferFailed(f"the other daemon's memory cannot be read: {error}") from error

        return SimSession(self, Source(src, card.address, read), dst)

    async def aclose(self) -> None:
        """See port.Transport."""

    async def carry(self, copy: "SimCopy", runs: Runs, src: Source, dst: MappedRegion, fault: Fault | None) -> Moved:
        """Occupies the link, waits, and copies.

        Raises:
            TransferFailed: the fault says so, or the other daemon's memory cannot be read.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        await failpoint(Point.KVD_LINK)
        if fault is Fault.STALL:
            await loop.create_future()  # until the session's close cancels it
        async with self._link:
            if copy.cancelled:
                return Moved(0, 0, cancelled=True)
            await self._sleep(runs.total / self.bandwidth)
        if self.delay:
            await self._sleep(self.delay)
        at = runs.src + np.uint64(src.base)
        to = runs.dst + np.uint64(dst.offset)
        if fault is Fault.FAIL:
            half = len(runs) // 2
            src.read(to[:half], at[:half], runs.length[:half])
            raise TransferFailed("the simulated link failed")
        if fault is Fault.WRONG_BLOCK:
            at = np.minimum(at + runs.length, np.uint64(src.base + src.region.size) - runs.length)
        if fault is not Fault.COPY_NOTHING:
            src.read(to, at, runs.length)
        return Moved(runs.total, int((loop.time() - began) * 1e9))


class SimSession:
    """See port.FarSession."""

    def __init__(self, transport: SimTransport, src: Source, dst: MappedRegion) -> None:
        self._transport = transport
        self._src = src
        self._dst = dst
        self._tasks: set[asyncio.Task[Moved]] = set()
        self._closed = False

    @property
    def over(self) -> bool:
        """See port.FarSession."""
        return self._closed

    def start(self, runs: Runs) -> "SimCopy":
        """See port.Session."""
        if self._closed:
            raise TransferFailed("the session is closed")
        check_runs(runs, self._src.region, self._dst)
        copy = SimCopy()
        fault = self._transport.faults.next()
        task = asyncio.create_task(self._transport.carry(copy, runs, self._src, self._dst, fault))
        copy.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return copy

    async def close(self) -> None:
        """See port.Session."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class SimCopy:
    """See port.Copy."""

    def __init__(self) -> None:
        self.cancelled = False
        self.task: asyncio.Task[Moved] | None = None

    def cancel(self) -> None:
        """See port.Copy."""
        self.cancelled = True

    async def wait(self) -> Moved:
        """See port.Copy."""
        assert self.task is not None
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise TransferFailed("the session was closed under the copy")
        return self.task.result()
