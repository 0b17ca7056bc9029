"""The accelerators of this process, by CUDA or HIP: see port.Devices.

Two ways to copy, by configuration: one launch of a gather/scatter kernel, or one batch for the copy engines.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pdserve.kvd.config import GpuCopy
from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import ALIGNMENT, Place, parts_of
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.rpc.errors import ConfigError

_SPIN_S: Final = 0.001
_LOOK_S: Final = 20e-6


class GpuDevices:
    """See port.Devices."""

    def __init__(self, method: GpuCopy) -> None:
        """Raises ConfigError where torch, Triton or a device is missing."""
        try:
            from pdserve.kvd.transport.device import kernel  # seconds of imports that only this needs
        except ImportError as error:
            raise ConfigError(f"gpu_ipc needs torch and Triton, as vLLM brings them: {error}") from error
        try:
            runtime = Runtime(*kernel.built_for())
        except DeviceFailed as error:
            raise ConfigError(f"gpu_ipc cannot be used here: {error}") from error
        if method is GpuCopy.ENGINES and not runtime.batches:
            raise ConfigError("--gpu-copy engines needs CUDA 13 or newer; use kernel")
        self._runtime = runtime
        self._method = method
        self._gatherer: Any = kernel.Gatherer
        self._devices: dict[str, GpuDevice] = {}
        self.kind: Final = runtime.kind

    def find(self, bus_id: str) -> "GpuDevice":
        """See port.Devices."""
        name = bus_id.lower()
        if name not in self._devices:
            index = self._runtime.index_of(bus_id)
            self._devices[name] = GpuDevice(self._runtime, index, name, self._method, self._gatherer)
        return self._devices[name]


class GpuDevice:
    """See port.Device. Made without touching the device: that is for its thread."""

    def __init__(self, runtime: Runtime, index: int, bus_id: str, method: GpuCopy, gatherer: Any) -> None:
        self.bus_id = bus_id
        self._runtime = runtime
        self._index = index
        self._method = method
        self._make_gatherer = gatherer
        self._gatherer: Any = None
        self._stream = 0
        self._events: list[int] = []
        """Of launches that are over."""

    def open(self, handle: bytes) -> tuple[int, int]:
        """See port.Device."""
        self._runtime.use(self._index)
        address = self._runtime.open_memory(handle)
        try:
            base, size = self._runtime.range_of(address)
        except DeviceFailed:
            self._runtime.close_memory(address)
            raise
        return address, size - (address - base)

    def close(self, address: int) -> None:
        """See port.Device."""
        self._runtime.use(self._index)
        self._runtime.close_memory(address)

    def open_event(self, handle: bytes) -> "GpuEvent":
        """See port.Device."""
        self._runtime.use(self._index)
        return GpuEvent(self._runtime, self._index, self._runtime.open_event(handle))

    def warm_up(self, place: Place) -> None:
        """See port.Device."""
        one = np.zeros(1, np.uint64)
        self.launch(Runs(one, one, one + np.uint64(ALIGNMENT)), place, place).wait()  # onto itself

    def launch(self, runs: Runs, src: Place, dst: Place) -> "GpuLaunch":
        """See port.Device."""
        runtime = self._runtime
        runtime.use(self._index)  # the loop's thread launches on other devices too
        if self._gatherer is None:
            self._stream = self._stream or runtime.make_stream()
            self._gatherer = self._make_gatherer(self._index, self._stream, runtime)
        table: Any = None
        if self._method is GpuCopy.KERNEL:
            table = self._gatherer.launch(runs, src, dst)
        else:
            parts = parts_of(runs, src, dst)
            runtime.copy_batch(parts.dst, parts.src, parts.length, self._stream)
        event = self._events.pop() if self._events else runtime.make_event(shared=False)
        runtime.record(event, self._stream)
        return GpuLaunch(runtime, event, lambda: self._over(event, table))

    def _over(self, event: int, table: Any) -> None:
        self._events.append(event)
        if table is not None:
            self._gatherer.over(table)


class GpuEvent:
    """See port.Event."""

    def __init__(self, runtime: Runtime, index: int, event: int) -> None:
        self._runtime = runtime
        self._index = index
        self._event = event

    def done(self) -> bool:
        """See port.Event."""
        # Asked by a thread that has no device. The first one, as is the rule then, may be one that kvd has nothing on:
        # that would cost it half a gigabyte, and the event loop the time that it takes.
        self._runtime.use(self._index)
        return self._runtime.passed(self._event)

    def close(self) -> None:
        """See port.Event."""
        self._runtime.destroy_event(self._event)


class GpuLaunch:
    """See port.Launch."""

    def __init__(self, runtime: Runtime, event: int, over: Callable[[], None]) -> None:
        self._runtime = runtime
        self._event = event
        self._over = over

    def wait(self) -> None:
        """See port.Launch."""
        # The runtime's own wait spins without an end, or comes back 0.1 ms late. This one spins for as long as a copy
        # takes that has the device to itself, and then costs little.
        patience = time.monotonic() + _SPIN_S
        while not self._runtime.passed(self._event):
            if time.monotonic() > patience:
                time.sleep(_LOOK_S)
        self._over()
