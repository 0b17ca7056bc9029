"""Memory of CUDA's and HIP's devices for a measurement, in the process that is there for it: see device_worker.Owns."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pdserve.kvd.transport.device.export import Exported
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.types import DeviceMemory, MemoryKind
from pdserve.rpc.errors import ConfigError, TransferFailed

_LEFT_FREE: Final = 1 << 30
"""Of a device, at least: half of it is for what kvd itself has on a device that it copies on, and stays with kvd."""


def own_devices(kind: MemoryKind) -> "Owned":
    """Raises TransferFailed where torch, Triton, the runtime or a device is missing."""
    try:
        from pdserve.kvd.transport.device import kernel  # finds the runtime's library by torch: seconds

        built_for, version = kernel.built_for()
        if built_for is not kind:
            raise TransferFailed(f"the torch that is installed is for {built_for.value} memory, not {kind.value}")
        return Owned(kind, version)
    except ImportError as error:
        raise TransferFailed(f"device memory needs torch and Triton: {error}") from error
    except DeviceFailed as error:
        raise TransferFailed(str(error)) from error


class Owned:
    """See the module."""

    def __init__(self, kind: MemoryKind, version: str) -> None:
        """Raises DeviceFailed where there is no device."""
        self._kind, self._version = kind, version
        self._runtime = Runtime(kind, version)
        self._buses = [self._runtime.bus_id(index) for index in range(self._runtime.count())]
        self._address: dict[DeviceMemory, int] = {}
        self._streams: dict[str, int] = {}
        self._events: dict[str, int] = {}

    def buses(self) -> Sequence[str]:
        """See Owns."""
        return self._buses

    def make(self, bus_id: str, nbytes: int) -> DeviceMemory:
        """See Owns."""
        try:
            self._use(bus_id)
            free = self._runtime.free_memory()
            if free < nbytes + _LEFT_FREE:
                needed = nbytes + _LEFT_FREE >> 20
                raise TransferFailed(f"{free >> 20} MiB of {bus_id} are free, and {needed} MiB are to be")
            address = self._runtime.allocate(nbytes)
            device = self._buses.index(bus_id)
            memory = Exported(self._kind, self._version, device, [(address, nbytes)]).memory
        except (DeviceFailed, ConfigError) as error:
            raise TransferFailed(f"no memory of {bus_id}: {error}") from error
        self._address[memory] = address
        return memory

    def write(self, memory: DeviceMemory, offset: int, data: bytes) -> None:
        """See Owns."""
        ours = np.frombuffer(data, np.uint8)
        self._copy(memory.bus_id, self._address[memory] + offset, ours.ctypes.data, len(data))

    def read(self, memory: DeviceMemory, offset: int, nbytes: int) -> bytes:
        """See Owns."""
        ours = np.empty(nbytes, np.uint8)
        self._copy(memory.bus_id, ours.ctypes.data, self._address[memory] + offset, nbytes)
        return ours.tobytes()

    def _copy(self, bus_id: str, dst: int, src: int, nbytes: int) -> None:
        try:
            self._use(bus_id)
            self._runtime.copy(dst, src, nbytes, self._streams[bus_id])
            self._runtime.record(self._events[bus_id], self._streams[bus_id])
            self._runtime.wait(self._events[bus_id])
        except DeviceFailed as error:
            raise TransferFailed(f"device {bus_id}: {error}") from error

    def _use(self, bus_id: str) -> None:
        if bus_id not in self._buses:
            raise DeviceFailed("no such device")
        self._runtime.use(self._buses.index(bus_id))
        if bus_id not in self._streams:
            self._streams[bus_id] = self._runtime.make_stream()
            self._events[bus_id] = self._runtime.make_event(shared=False)
