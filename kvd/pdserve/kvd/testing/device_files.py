"""Device memory made of files, for measurements without a device: handles name the process that has it, as IPC's do.

A module of its own so that it is loaded where the real one would be (`probing.device_memory`): in a process of kvd's,
by its name. What devices there are, a test says by one environment variable.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.types import DeviceMemory, MemoryKind, Piece
from pdserve.rpc.errors import TransferFailed

VARIABLE: Final = "PDSERVE_FAKE_DEVICES"
_HANDLE: Final = struct.Struct("<QQQ40x")
"""Process, descriptor, bytes: what `testing.mori_devices` opens too."""


class FakeDevices(msgspec.Struct, frozen=True):
    """The devices of a machine."""

    free: dict[str, int] = {}
    """PCI bus id -> bytes."""
    missing: str = ""
    """Why there is none."""

    def to_env(self) -> str:
        """What the variable is to hold."""
        return msgspec.json.encode(self).decode()


def own_devices(kind: MemoryKind) -> "OwnedFiles":
    """See device_worker.Owns; of any kind."""
    devices = msgspec.json.decode(os.environ[VARIABLE], type=FakeDevices)
    if devices.missing:
        raise TransferFailed(devices.missing)
    return OwnedFiles(dict(devices.free))


class OwnedFiles:
    """See device_worker.Owns."""

    def __init__(self, free: dict[str, int]) -> None:
        self._free = free
        self._files: dict[DeviceMemory, int] = {}

    def buses(self) -> Sequence[str]:
        """See Owns."""
        return list(self._free)

    def make(self, bus_id: str, nbytes: int) -> DeviceMemory:
        """See Owns."""
        if self._free[bus_id] < nbytes:
            raise TransferFailed(f"{self._free[bus_id]} bytes of {bus_id} are free")
        self._free[bus_id] -= nbytes
        fd = os.memfd_create("fake-device")
        os.ftruncate(fd, nbytes)
        memory = DeviceMemory(bus_id, (Piece(_HANDLE.pack(os.getpid(), fd, nbytes), 0, nbytes),))
        self._files[memory] = fd
        return memory

    def write(self, memory: DeviceMemory, offset: int, data: bytes) -> None:
        """See Owns."""
        os.pwrite(self._files[memory], data, offset)

    def read(self, memory: DeviceMemory, offset: int, nbytes: int) -> bytes:
        """See Owns."""
        return os.pread(self._files[memory], nbytes, offset)


class OpenedFiles(dict[bytes, NDArray[np.uint8]]):
    """What `testing.device.FakeGpus` may open (`exported`): files of other processes too, while these live."""

    def get(self, handle: bytes, default: object = None) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The memory of a handle, opened when first asked for."""
        if handle not in self:
            pid, fd, size = _HANDLE.unpack(handle)
            try:
                opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            except OSError:
                return None
            self[handle] = np.frombuffer(mmap.mmap(opened, size), np.uint8)
            os.close(opened)
        return self[handle]
