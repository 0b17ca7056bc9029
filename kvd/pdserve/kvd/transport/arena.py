"""One range of addresses in which every region of the node is mapped, and the fast way to copy in it.

    arena  |<- region A ->|..|<- region B ->|.......... reserved, no memory ..........|

Regions lie side by side in one `mmap` object, so that `mmap.move`, a C method on offsets, copies
from one to another. It costs 0.3 µs a call where a ctypes memmove costs 0.8 µs and
process_vm_readv 0.7 µs a page, which decides the speed of scattered 16 KiB blocks. A long run goes
through a memmove that lets go of the interpreter lock.

Shared memory has 4 KiB pages, and scattered copies wait for one page walk after the other. A gather
of one byte of each page beforehand lets the processor do the walks of a batch side by side, which is
worth 10 % at 16 KiB and 25 % at 4 KiB (measured on a virtual machine, where a walk is longest).
"""

import bisect
import collections
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from pdserve.kvd.plan import Offsets

_RESERVES: Final = (1 << 42, 1 << 39, 1 << 36)
"""Bytes of addresses to ask for, no memory; less where the process is limited (ulimit -v)."""
_PAGE: Final = mmap.PAGESIZE
_GUARD: Final = _PAGE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_LONG_RUN: Final = 256 << 10
"""From here on a run is copied by itself, without the interpreter lock."""
_BATCH_BYTES: Final = 1 << 20
"""The lock is held for no longer than this takes (some 100 µs), and its pages fit the second-level TLB."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_memmove = _libc.memmove
_memmove.restype = None
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FAILED: Final = ctypes.c_void_p(-1).value


def _reserve(reserves: Sequence[int]) -> mmap.mmap:
    error: Exception = OSError(errno.ENOMEM, "no size to reserve was given")
    for size in reserves:
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError) as failed:
            error = failed
    raise OSError(errno.ENOMEM, f"no addresses for an arena: {error}") from error


class _Pages:
    """Where the pages of runs with these lengths begin."""

    def __init__(self, length: Offsets) -> None:
        first = int(length[0])
        self._same = np.arange(0, first, _PAGE) if int(length.min()) == int(length.max()) else None
        """Within a run, where all are equally long (blocks that could not be merged)."""
        if self._same is None:
            count = (length.astype(np.int64) + _PAGE - 1) // _PAGE
            self._ends = np.cumsum(count)
            self._run = np.repeat(np.arange(len(count)), count)
            self._step = (np.arange(len(self._run)) - (self._ends - count)[self._run]) * _PAGE

    def of(self, offset: Offsets) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """The pages of runs that begin at these offsets, run by run."""
        at = offset.astype(np.int64)
        if self._same is not None:
            return (at[:, None] + self._same).ravel()
        pages: np.ndarray[tuple[int], np.dtype[np.int64]] = at[self._run] + self._step
        return pages

    def slice(self, low: int, high: int) -> slice:
        """Which of them belong to runs `low` to `high` (exclusive)."""
        if self._same is not None:
            return slice(low * len(self._same), high * len(self._same))
        return slice(int(self._ends[low - 1]) if low else 0, int(self._ends[high - 1]))


class Arena:
    """Owns the mappings; not the files. Offsets are from the arena's start."""

    def __init__(self, reserves: Sequence[int] = _RESERVES) -> None:
        """Takes the first of `reserves` (bytes) that it can get; raises OSError where it gets none."""
        self._arena = _reserve(reserves)
        reserve = len(self._arena)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * reserve).from_address(self._base))
        self._sizes: dict[int, int] = {}
        """Mapped: offset -> bytes, whole pages."""
        self._gaps: list[tuple[int, int]] = [(0, reserve)]
        """(offset, bytes) without a region, in order, no two side by side."""
        self._blank(0, reserve)

    def map(self, fd: int, size: int) -> int:
        """Maps the first `size` bytes of a file; its offset.

        Raises:
            OSError: the file cannot be mapped, or the arena is full.
        """
        length = -(-size // _PAGE) * _PAGE
        needed = length + _GUARD
        index = next((i for i, (_, room) in enumerate(self._gaps) if room >= needed), None)
        if index is None:
            raise OSError(errno.ENOMEM, f"no {length} bytes of addresses left")
        at, room = self._gaps[index]
        self._map(at, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        self._sizes[at] = length
        self._gaps[index : index + 1] = [(at + needed, room - needed)] if room > needed else []
        return at

    def unmap(self, offset: int) -> None:
        """Takes a region out; nothing may copy from or to it any more."""
        length = self._sizes.pop(offset)
        self._blank(offset, length)
        bisect.insort(self._gaps, (offset, length + _GUARD))
        merged: list[tuple[int, int]] = []
        for at, room in self._gaps:
            if merged and sum(merged[-1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((at, room))
        self._gaps = merged

    def move(self, dst: Offsets, src: Offsets, length: Offsets, stop: Callable[[], bool] = lambda: False) -> int:
        """Copies runs between arena offsets, all in mapped regions; the bytes copied.

        `stop` is asked after every 1 MiB or long run; when it says so, the rest is left out.
        """
        if not len(length):
            return 0
        to, at, count = dst.tolist(), src.tolist(), length.tolist()
        ends = np.cumsum(length)
        pages = _Pages(length)
        reads, writes = pages.of(src), pages.of(dst)
        low = moved = 0
        while low < len(count) and not stop():
            if count[low] >= _LONG_RUN:
                _memmove(self._base + to[low], self._base + at[low], count[low])
                high = low + 1
            else:
                high = max(low + 1, int(np.searchsorted(ends, np.uint64(moved + _BATCH_BYTES), side="right")))
                touched = pages.slice(low, high)
                self._bytes.take(reads[touched])
                self._bytes.take(writes[touched])
                collections.deque(map(self._arena.move, to[low:high], at[low:high], count[low:high]), maxlen=0)
            moved = int(ends[high - 1])
            low = high
        return moved

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a region, for tests and tools; release it before `close`."""
        return memoryview(self._arena)[offset : offset + size]

    def close(self) -> None:
        """Unmaps everything; safe twice."""
        if not self._arena.closed:
            self._sizes.clear()
            self._arena.close()

    def _blank(self, offset: int, length: int) -> None:
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(offset, length, 0, anonymous, -1)

    def _map(self, offset: int, length: int, prot: int, flags: int, fd: int) -> None:
        if _mmap(self._base + offset, length, prot, flags, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
