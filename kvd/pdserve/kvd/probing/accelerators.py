"""Measures the ways between the memories of this node's GPUs: within each, and to each from the one before it.

Over scratch memory that a process of kvd's own has on them (`device_scratch`), taken as an engine's is. Where there is
none to be had, that is said, and is no transport's fault.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pdserve.kvd.probing.device_scratch import DeviceScratch, OpenScratch
from pdserve.kvd.probing.measuring import Landed
from pdserve.kvd.probing.slot import whole
from pdserve.kvd.probing.timing import Timing
from pdserve.kvd.probing.values import Measured, Way
from pdserve.kvd.probing.ways import pairs, way
from pdserve.kvd.transport.port import MappedRegion, TakesDevices, Transport
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey
from pdserve.rpc.errors import InvalidRequest, PdserveError, TransferFailed

_NO_TIME: Final = "there was no time left"


class Accelerators:
    """See the module. `nbytes`: of scratch memory on each side."""

    def __init__(self, transports: Sequence[Transport], open_scratch: OpenScratch, timing: Timing, nbytes: int) -> None:
        self._transports = transports
        self._takers = [one for one in transports if isinstance(one, TakesDevices) and one.capabilities.same_node]
        self._open = open_scratch
        self._timing = timing
        self._nbytes = nbytes

    def kinds(self) -> set[MemoryKind]:
        """Of device memory that a transport takes."""
        return {kind for one in self._takers for kind in one.capabilities.kinds} - {MemoryKind.HOST}

    async def ways(self, kind: MemoryKind, left_out: Mapping[str, str], deadline: float, *, needed: bool) -> list[Way]:
        """Those of one kind of memory. `needed`: engines here have such memory; where not, it is no fault that no
        transport takes it."""
        found: list[Way] = []
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._timing.left(deadline)):
                    scratch = await stack.enter_async_context(self._open(kind))
                if not scratch.buses:
                    raise TransferFailed("no GPU is seen here")
                ends = _Ends(scratch, self._nbytes)
                for pair in pairs(scratch.buses):
                    made = await self._way(kind, ends, pair, left_out, deadline, needed=needed)
                    found.append(replace(made, devices=pair))
        except TimeoutError:
            found.append(self._made(kind, {}, left_out, {}, needed=needed, not_measured=_NO_TIME))
        except PdserveError as error:
            unable = {} if needed else {one.capabilities.name: error.message for one in self._takers}
            found.append(self._made(kind, {}, left_out, unable, needed=needed, not_measured=error.message))
        return found

    async def _way(
        self,
        kind: MemoryKind,
        ends: "_Ends",
        pair: tuple[str, str],
        left_out: Mapping[str, str],
        deadline: float,
        *,
        needed: bool,
    ) -> Way:
        measured, unable, not_measured = dict[str, Measured](), dict[str, str](), ""
        try:
            async with asyncio.timeout(self._timing.left(deadline)):
                src, dst = await ends.of(pair)
        except (PdserveError, TimeoutError) as error:
            why = error.message if isinstance(error, PdserveError) else _NO_TIME
            return self._made(kind, {}, left_out, {}, needed=needed, not_measured=why)
        for taker in self._takers:
            can = taker.capabilities
            if kind in can.kinds:
                try:
                    measured[can.name] = await self._through(taker, kind, ends, (src, dst), deadline)
                except InvalidRequest as refusal:
                    if MemoryKind.HOST not in can.kinds:  # it is there for this memory alone
                        measured[can.name] = Measured(error=refusal.message)
                    elif needed:  # it has taken that of engines, some of which do for themselves what kvd cannot
                        not_measured = refusal.message
                    else:
                        unable[can.name] = refusal.message
        return self._made(kind, measured, left_out, unable, needed=needed, not_measured=not_measured)

    async def _through(
        self,
        taker: TakesDevices,
        kind: MemoryKind,
        ends: "_Ends",
        memories: tuple[DeviceMemory, DeviceMemory],
        deadline: float,
    ) -> Measured:
        """Raises InvalidRequest where it does not take the memory."""
        name = f"scratch-{uuid.uuid4()}"
        src, dst = (MappedRegion(RegionKey(name, rank), kind, self._nbytes, 0) for rank in (0, 1))
        try:
            async with asyncio.timeout(self._timing.left(deadline)):
                await taker.take(src, memories[0])
                await taker.take(dst, memories[1])
            landed = ends.landed(memories)
            return await self._timing.timed(taker.open(src, dst), self._nbytes, landed, deadline)
        except TimeoutError:
            return Measured(error="it did not take the memory in time")
        finally:
            for region in (src, dst):
                with contextlib.suppress(TransferFailed):  # a library's process has ended, and knows nothing any more
                    await whole(taker.give_back(region))

    def _made(
        self,
        kind: MemoryKind,
        measured: Mapping[str, Measured],
        left_out: Mapping[str, str],
        unable: Mapping[str, str],
        *,
        needed: bool,
        not_measured: str = "",
    ) -> Way:
        able = [one.capabilities for one in self._transports]
        made = way("", kind, able, None, measured, left_out, unable=unable, needed=needed)
        return replace(made, not_measured=not_measured)


class _Ends:
    """Scratch memory of each device: one to be read, one to be written."""

    def __init__(self, scratch: DeviceScratch, nbytes: int) -> None:
        self._scratch = scratch
        self._nbytes = nbytes
        self._made: dict[tuple[str, bool], DeviceMemory] = {}
        # Another one for each device: what an earlier way has left in the destination is not what this one brings.
        self._seeds: dict[str, int] = {}

    async def of(self, pair: tuple[str, str]) -> tuple[DeviceMemory, DeviceMemory]:
        """Raises TransferFailed."""
        source, target = pair
        return await self._one(source, filled=True), await self._one(target, filled=False)

    def landed(self, memories: tuple[DeviceMemory, DeviceMemory]) -> Landed:
        """Whether a copy between these two is right."""
        src, dst = memories
        return lambda runs: self._scratch.landed(dst, runs, self._seeds[src.bus_id])

    async def _one(self, bus: str, *, filled: bool) -> DeviceMemory:
        found = self._made.get((bus, filled))
        if found is None:
            seed = self._seeds.setdefault(bus, random.getrandbits(64)) if filled else None
            found = self._made[bus, filled] = await self._scratch.make(bus, self._nbytes, seed)
        return found
