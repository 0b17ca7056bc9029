"""Device memory for the fake mori: files of memory, whose handles name the process that has them, as IPC handles do."""

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.transport.mori_devices import Opens
from pdserve.kvd.types import DeviceMemory, Piece
from pdserve.rpc.errors import TransferFailed

BUS_ID: Final = "0000:1b:00.0"
BEFORE: Final = 4096
"""Bytes before each piece in its allocation."""
_HANDLE: Final = struct.Struct("<QQQ40x")
"""Process, descriptor, bytes."""


_foreign: Final[list[range]] = []
"""Addresses of memory of other processes that this one has opened."""


def is_foreign(address: int) -> bool:
    """Whether there is memory of another process."""
    return any(address in opened for opened in _foreign)


class FakeDeviceMemory:
    """One rank's memory on the fake device, a piece in each of its allocations, every byte the same."""

    def __init__(self, sizes: Sequence[int], fill: int | None, files: Sequence[int] = ()) -> None:
        """`fill` None: as `files`, which have the allocations, are."""
        self._files = [os.dup(fd) for fd in files] or [os.memfd_create("fake-gpu") for _ in sizes]
        self._sizes = sizes
        if fill is not None:
            for fd, size in zip(self._files, sizes, strict=True):
                os.pwrite(fd, bytes(BEFORE) + bytes([fill]) * size, 0)
        handles = [_HANDLE.pack(os.getpid(), fd, BEFORE + size) for fd, size in zip(self._files, sizes, strict=True)]
        pieces = (Piece(handle, BEFORE, size) for handle, size in zip(handles, sizes, strict=True))
        self.memory = DeviceMemory(BUS_ID, tuple(pieces))
        self.size = sum(sizes)

    def addresses(self) -> list[int]:
        """Of each piece, in the process that has it."""
        self._maps = [mmap.mmap(fd, BEFORE + size) for fd, size in zip(self._files, self._sizes, strict=True)]
        return [ctypes.addressof(ctypes.c_char.from_buffer(one)) + BEFORE for one in self._maps]

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of the region's bytes."""
        parts = [os.pread(fd, size, BEFORE) for fd, size in zip(self._files, self._sizes, strict=True)]
        return np.frombuffer(b"".join(parts), np.uint8)

    def close(self) -> None:
        """The engine has ended."""
        for fd in self._files:
            os.close(fd)


def open_devices() -> Opens:
    """See transport.mori_devices."""
    return _FakeDevices()


class _FakeDevices:
    """See Opens."""

    def __init__(self) -> None:
        self._open: dict[bytes, mmap.mmap] = {}

    def open(self, bus_id: str, pieces: Sequence[Piece]) -> tuple[int, list[int]]:
        """See Opens."""
        if bus_id != BUS_ID:
            raise TransferFailed(f"device {bus_id}: no such device")
        return 0, [self._address(piece.handle) + piece.offset for piece in pieces]

    def close(self, pieces: Sequence[Piece]) -> None:
        """See Opens: kept, as the device's thread may still look there."""

    def make(self, bus_id: str, size: int) -> tuple[int, int]:
        """See Opens."""
        if bus_id != BUS_ID:
            raise TransferFailed(f"device {bus_id}: no such device")
        own = self._open[os.urandom(_HANDLE.size)] = mmap.mmap(-1, size)
        return 0, ctypes.addressof(ctypes.c_char.from_buffer(own))

    def _address(self, handle: bytes) -> int:
        if handle not in self._open:
            pid, fd, size = _HANDLE.unpack(handle)
            try:
                opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            except OSError as error:
                raise TransferFailed(f"device {BUS_ID}: invalid argument ({error})") from error
            self._open[handle] = mmap.mmap(opened, size)
            os.close(opened)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._open[handle]))
            _foreign.append(range(start, start + size))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._open[handle]))
