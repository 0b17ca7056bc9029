"""Copies between device memory of one node, which kvd opens by the handles of its engines.

One thread per device maps, launches and waits, so that nothing of that ever holds the event loop up.
A copy goes in batches, of which a few at most are with the device: cancelling one leaves out the rest.

    start ──▶ waits for the source's events ──▶ device thread: batch, batch, ... ──▶ terminal
      '──▶ nothing to wait for, thread idle: the first batch at once ──┘

To launch takes some 0.1 ms, and never waits; so does the way to the thread, on which the device would do nothing.

A copy is terminal only when the thread has seen its last batch done. So LANDED is told after the
bytes are in the device's memory, and whatever decode launches after that finds them there.
"""

import asyncio
import collections
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import ALIGNMENT, Place, aligned, batches, surely_inside
from pdserve.kvd.transport.device.port import DeviceFailed, Devices, Event, Launch
from pdserve.kvd.transport.device.worker import DeviceWorker
from pdserve.kvd.transport.mover import Stop
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved
from pdserve.kvd.transport.shm import check_runs
from pdserve.kvd.types import DeviceMemory, RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed

log = structlog.get_logger(__name__)

_BATCH_BYTES: Final = 1 << 30
"""Some 0.5 ms of an H200: what a cancelled copy still moves, up to three times."""
_FLYING: Final = 3
"""Batches with the device: one that it copies, one that it copies next, and one that is made ready meanwhile."""
_POLL_S: Final = 0.0005
"""Between two looks at an event that is not passed; the loop's clock makes some 1 ms of it."""


@dataclass(slots=True)
class _Taken:
    """A rank's memory, mapped on its own device."""

    worker: DeviceWorker
    memory: DeviceMemory
    size: int
    events: Sequence[Event]
    waiting: dict[int, Event] = field(default_factory=dict)
    """Announced, and not seen passed; by slot."""

    def not_yet(self) -> list[Event]:
        """What was announced and is not computed."""
        self.waiting = {slot: event for slot, event in self.waiting.items() if not event.done()}
        return list(self.waiting.values())


class GpuIpcTransport:
    """See port.TakesDevices."""

    def __init__(self, devices: Devices, batch_bytes: int = _BATCH_BYTES) -> None:
        self.capabilities: Final = Capabilities("gpu_ipc", frozenset({devices.kind}), same_node=True)
        self._devices = devices
        self._batch_bytes = batch_bytes
        self._workers: dict[str, DeviceWorker] = {}
        self._taken: dict[RegionKey, _Taken] = {}

    async def take(self, region: MappedRegion, memory: DeviceMemory) -> None:
        """See port.TakesDevices."""
        if region.key in self._taken:
            raise InvalidRequest(f"the memory of {region.key} is mapped already")
        try:
            worker = self._worker(memory.bus_id)
            taken = await worker.run(lambda: _take(worker, memory), undo=_give_back)
        except DeviceFailed as error:
            raise InvalidRequest(f"device {memory.bus_id}: {error}") from error
        if region.key in self._taken or taken.size != region.size:
            await worker.submit(lambda: _give_back(taken))
            raise InvalidRequest(f"a region of {region.size} bytes in pieces of {taken.size}, or one that is mapped")
        self._taken[region.key] = taken

    async def give_back(self, region: MappedRegion) -> None:
        """See port.TakesDevices."""
        taken = self._taken.pop(region.key, None)
        if taken is not None:
            await taken.worker.submit(lambda: _give_back(taken))

    def announced(self, key: RegionKey, step: int, layer: int | None) -> None:
        """See port.TakesDevices."""
        taken = self._taken.get(key)
        if taken is not None and (slot := taken.memory.slot(step, layer)) is not None:
            taken.waiting[slot] = taken.events[slot]

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "GpuSession":
        """See port.Transport. The destination's device copies; the source's memory is mapped there too."""
        source, target = self._taken.get(src.key), self._taken.get(dst.key)
        if source is None or target is None:
            raise TransferFailed("the device memory of an engine that has ended")
        worker, mappings = target.worker, target.worker.mappings
        ends = (source.memory, target.memory)

        def unmap() -> None:
            for memory in ends:
                _unmap(worker, memory)

        try:
            places = await worker.run(lambda: mappings.map_all(ends), undo=lambda _: unmap())
        except DeviceFailed as error:
            raise TransferFailed(f"{src.key} cannot be reached from {dst.key}: {error}") from error
        return GpuSession(self._batch_bytes, worker, source, (src, dst), places, unmap)

    async def aclose(self) -> None:
        """See port.Transport."""
        for taken in self._taken.values():
            await taken.worker.submit(lambda taken=taken: _give_back(taken))  # type: ignore[misc]  # bound early
        self._taken.clear()
        for worker in self._workers.values():
            await worker.aclose()

    def _worker(self, bus_id: str) -> DeviceWorker:
        device = self._devices.find(bus_id)
        if device.bus_id not in self._workers:
            self._workers[device.bus_id] = DeviceWorker(device)
        return self._workers[device.bus_id]


def _take(worker: DeviceWorker, memory: DeviceMemory) -> _Taken:
    place = worker.mappings.map(memory)
    events: list[Event] = []
    taken = _Taken(worker, memory, place.size, events)
    try:
        for handle in memory.events:
            events.append(worker.device.open_event(handle))
        worker.device.warm_up(place)
    except DeviceFailed:
        _give_back(taken)
        raise
    return taken


def _give_back(taken: _Taken) -> None:
    for event in taken.events:
        try:
            event.close()
        except DeviceFailed as error:
            log.warning("device_event_not_closed", device=taken.worker.device.bus_id, error=str(error))
    _unmap(taken.worker, taken.memory)


def _unmap(worker: DeviceWorker, memory: DeviceMemory) -> None:
    try:
        worker.mappings.unmap(memory)
    except DeviceFailed as error:  # of a process that has died, say: there is nothing else to do about it
        log.warning("device_memory_not_unmapped", device=worker.device.bus_id, error=str(error))


class GpuSession:
    """See port.Session."""

    def __init__(
        self,
        batch_bytes: int,
        worker: DeviceWorker,
        source: _Taken,
        regions: tuple[MappedRegion, MappedRegion],
        places: Sequence[Place],
        unmap: Callable[[], None],
    ) -> None:
        self._batch_bytes = batch_bytes
        self._worker = worker
        self._source = source
        self._regions = regions
        self._places = places
        self._unmap = unmap
        self._copies: set[GpuCopy] = set()
        self._line: list[GpuCopy] = []
        """Copies that the thread does not have yet, in order."""
        self._warm = False
        """A copy has been made: what a first one has to wait for, a kernel that is compiled say, is done."""
        self._closed = False

    def start(self, runs: Runs) -> "GpuCopy":
        """See port.Session."""
        if self._closed:
            raise TransferFailed("the session is closed")
        if not surely_inside(runs, *(region.size for region in self._regions)):  # a fifth of the time
            check_runs(runs, *self._regions)
        if not aligned(runs):
            raise TransferFailed(f"a copy on a device of bytes that are not multiples of {ALIGNMENT}")
        try:
            behind = self._source.not_yet()
        except DeviceFailed as error:
            raise TransferFailed(f"the source's device: {error}") from error
        copy = GpuCopy(self._worker, runs, self._places, self._batch_bytes)
        if behind or self._line or not self._warm or not self._worker.idle:
            self._line.append(copy)
            copy.task = asyncio.create_task(copy.carry(behind, self._line))
        else:
            copy.begin()
            copy.task = asyncio.create_task(copy.end(self._worker.submit(copy.run)))
        copy.task.add_done_callback(self._over)
        self._copies.add(copy)
        copy.task.add_done_callback(lambda _: self._copies.discard(copy))
        return copy

    def _over(self, task: "asyncio.Task[Moved]") -> None:
        self._warm = self._warm or (not task.cancelled() and task.exception() is None)

    async def close(self) -> None:
        """See port.Session."""
        first, self._closed = not self._closed, True
        copies = list(self._copies)
        for copy in copies:
            copy.cancel()
        tasks = [copy.task for copy in copies if copy.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if first:
            await self._worker.submit(self._unmap)


class GpuCopy:
    """See port.Copy. `run` is called in the device's thread."""

    def __init__(self, worker: DeviceWorker, runs: Runs, places: Sequence[Place], batch_bytes: int) -> None:
        self._worker = worker
        self._total = runs.total
        self._places = places
        # The first one is cut here, where the runs have just been looked through: the device would wait for it.
        rest = batches(runs, batch_bytes)
        self._batches = itertools.chain(list(itertools.islice(rest, 1)), rest)
        self._stop = Stop()
        self._began_ns = 0
        self._flying: collections.deque[tuple[Launch, int]] = collections.deque()
        self.task: asyncio.Task[Moved] | None = None

    def cancel(self) -> None:
        """See port.Copy."""
        self._stop.set()

    async def wait(self) -> Moved:
        """See port.Copy."""
        assert self.task is not None
        return await asyncio.shield(self.task)

    async def carry(self, behind: Sequence[Event], line: "list[GpuCopy]") -> Moved:
        """Waits for the source's events and for its turn in the line, and copies.

        Raises:
            TransferFailed: the device failed.
        """
        try:
            while not self._stop.is_set() and (line[0] is not self or not _passed(behind)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)  # a mark in another process' work wakes nobody
            done = self._worker.submit(self.run)
        except DeviceFailed as error:
            raise TransferFailed(f"the source's device: {error}") from error
        finally:
            line.remove(self)
        return await self.end(done)

    async def end(self, done: "asyncio.Future[Moved]") -> Moved:
        """What `run` says.

        Raises:
            TransferFailed: the device failed.
        """
        try:
            return await done
        except DeviceFailed as error:
            raise self._failed(error) from error

    def begin(self) -> None:
        """Launches the first batch. `run` must follow, in whichever thread.

        Raises:
            TransferFailed: the device failed; nothing was begun.
        """
        self._began_ns = time.monotonic_ns()
        try:
            self._launch(next(self._batches, None))
        except DeviceFailed as error:
            raise self._failed(error) from error

    def run(self) -> Moved:
        """Copies until all is done or it is cancelled; nothing of it is with the device then.

        Raises:
            DeviceFailed: a launch failed.
        """
        self._began_ns = self._began_ns or time.monotonic_ns()
        moved = 0
        try:
            for batch in self._batches:
                if self._stop.is_set():
                    break
                self._launch(batch)
                if len(self._flying) == _FLYING:
                    moved += self._landed()
        finally:
            while self._flying:
                moved += self._landed()
        return Moved(moved, time.monotonic_ns() - self._began_ns, cancelled=moved < self._total)

    def _launch(self, batch: Runs | None) -> None:
        if batch is not None:
            self._flying.append((self._worker.device.launch(batch, *self._places), batch.total))

    def _landed(self) -> int:
        launch, nbytes = self._flying.popleft()
        launch.wait()
        return nbytes

    def _failed(self, error: DeviceFailed) -> TransferFailed:
        return TransferFailed(f"device {self._worker.device.bus_id}: {error}")


def _passed(events: Sequence[Event]) -> bool:
    return all(event.done() for event in events)
