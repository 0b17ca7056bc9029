"""Accelerators made of host memory, for tests of all that does not need one.

An allocation's handle is 64 bytes that name it, as a real one's are. What a real device refuses is
refused: unknown handles, a handle opened twice, a device that is not there, memory out of reach.
"""

import contextlib
import ctypes
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import Place, parts_of
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.types import DeviceMemory, MemoryKind, Piece

BUS_ID: Final = "0000:1b:00.0"


class FakeGpus:
    """See port.Devices: `exported` and `events` are what engines have given away, by handle."""

    kind: Final = MemoryKind.CUDA

    def __init__(self, bus_ids: Sequence[str] = (BUS_ID,)) -> None:
        self._devices = {bus_id: FakeGpu(self, bus_id) for bus_id in bus_ids}
        self.exported: dict[bytes, NDArray[np.uint8]] = {}
        self.events: dict[bytes, FakeEvent] = {}

    def find(self, bus_id: str) -> "FakeGpu":
        """See port.Devices."""
        try:
            return self._devices[bus_id]
        except KeyError as error:
            raise DeviceFailed(f"no device {bus_id}") from error


@dataclass
class FakeEvent:
    """See port.Event. `passed` is set by hand."""

    passed: bool = True
    broken: bool = False
    opened: int = 0

    def done(self) -> bool:
        """See port.Event."""
        if self.broken:
            raise DeviceFailed("the event's process is gone")
        return self.passed

    def close(self) -> None:
        """See port.Event."""
        self.opened -= 1


@dataclass
class FakeGpu:
    """See port.Device. `before` is called in the device's thread ahead of each launch; what it raises fails it."""

    gpus: FakeGpus
    bus_id: str
    opened: dict[int, bytes] = field(default_factory=dict)
    """Address -> handle."""
    launches: list[int] = field(default_factory=list)
    """Bytes of each."""
    threads: set[int] = field(default_factory=set)
    """That have called it, but for launches."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held in each call: a second one fails, whatever thread it comes from."""
    before: Callable[[Runs], None] | None = None
    lie: bool = False
    """Says that it copied, and does not."""

    def open(self, handle: bytes) -> tuple[int, int]:
        """See port.Device."""
        self.threads.add(threading.get_ident())
        found = self.gpus.exported.get(handle)
        if found is None:
            raise DeviceFailed("invalid argument")
        address = int(found.ctypes.data)
        with self.alone():
            if address in self.opened:
                raise DeviceFailed("the handle is open already")
            self.opened[address] = handle
        return address, found.nbytes

    def close(self, address: int) -> None:
        """See port.Device."""
        if self.opened.pop(address, None) is None:
            raise DeviceFailed("not open")

    def open_event(self, handle: bytes) -> FakeEvent:
        """See port.Device."""
        if handle not in self.gpus.events:
            raise DeviceFailed("invalid resource handle")
        event = self.gpus.events[handle]
        event.opened += 1
        return event

    def warm_up(self, place: Place) -> None:
        """See port.Device."""

    def launch(self, runs: Runs, src: Place, dst: Place) -> "FakeLaunch":
        """See port.Device: copies in `wait`, so that nothing is there before it."""
        with self.alone():
            if self.before is not None:
                self.before(runs)
            self.launches.append(runs.total)
            return FakeLaunch(self, runs, src, dst)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A call; raises AssertionError under another one."""
        assert self.busy.acquire(blocking=False), "two threads call the device at a time"
        try:
            yield
        finally:
            self.busy.release()

    def check(self, address: int, nbytes: int) -> None:
        """Raises DeviceFailed where an address is of no allocation that is open."""
        for base, handle in self.opened.items():
            if base <= address and address + nbytes <= base + self.gpus.exported[handle].nbytes:
                return
        raise DeviceFailed("an illegal memory access was encountered")


class FakeLaunch:
    """See port.Launch."""

    def __init__(self, gpu: FakeGpu, runs: Runs, src: Place, dst: Place) -> None:
        self._gpu = gpu
        self._parts = parts_of(runs, src, dst)

    def wait(self) -> None:
        """See port.Launch."""
        if self._gpu.lie:
            return
        columns = (self._parts.dst, self._parts.src, self._parts.length)
        with self._gpu.alone():
            for dst, src, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                self._gpu.check(src, nbytes)
                self._gpu.check(dst, nbytes)
                ctypes.memmove(dst, src, nbytes)


class FakeDeviceMemory:
    """One rank's memory on a fake device: each piece 64 bytes into an allocation of its own, filled with noise."""

    def __init__(
        self, gpus: FakeGpus, sizes: Sequence[int], seed: int, *, bus_id: str = BUS_ID, layers: int = 0
    ) -> None:
        """`sizes`: bytes of each piece. `layers`: for how many there are events."""
        random = np.random.default_rng(seed)
        self._arrays: list[NDArray[np.uint8]] = []
        self.events = [FakeEvent() for _ in range(2 * (layers + 1) if layers else 0)]
        pieces = []
        for size in sizes:
            raw = np.empty(size + 64 + 256, np.uint8)
            skip = -raw.ctypes.data % 256
            array = raw[skip : skip + size + 64]
            array[:] = random.integers(0, 256, len(array), dtype=np.uint8)  # of one seed the same, wherever it lies
            handle = uuid.uuid4().bytes * 4
            gpus.exported[handle] = array
            self._arrays.append(array)
            pieces.append(Piece(handle, 64, size))
        handles = tuple(uuid.uuid4().bytes * 4 for _ in self.events)
        gpus.events.update(zip(handles, self.events, strict=True))
        self.memory = DeviceMemory(bus_id, tuple(pieces), handles)
        self.size = sum(sizes)

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of the region's bytes."""
        return np.concatenate([array[64:] for array in self._arrays])

    def around(self) -> NDArray[np.uint8]:
        """A copy of what lies before the pieces in their allocations."""
        return np.concatenate([array[:64] for array in self._arrays])
