"""One range of addresses in which every region of the node is mapped.

    arena  |<- region A ->|..|<- region B ->|.......... reserved, no memory ..........|

Regions lie side by side in one `mmap` object, so that a copy from one to another is a pair of offsets,
and a list of copies one call of a `Mover`.
"""

import bisect
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

from pdserve.kvd.plan import Offsets
from pdserve.kvd.transport.mover import MakeMover, Mover, Stop, make_mover

_RESERVES: Final = (1 << 42, 1 << 39, 1 << 36)
"""Bytes of addresses to ask for, no memory; less where the process is limited (ulimit -v)."""
_PAGE: Final = mmap.PAGESIZE
_GUARD: Final = _PAGE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FAILED: Final = ctypes.c_void_p(-1).value


def _reserve(reserves: Sequence[int]) -> mmap.mmap:
    error: Exception = OSError(errno.ENOMEM, "no size to reserve was given")
    for size in reserves:
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError) as failed:
            error = failed
    raise OSError(errno.ENOMEM, f"no addresses for an arena: {error}") from error


class Arena:
    """Owns the mappings, and a descriptor of each file. Offsets are from the arena's start."""

    def __init__(
        self, reserves: Sequence[int] = _RESERVES, make: MakeMover = make_mover, *, readable: bool = False
    ) -> None:
        """Takes the first of `reserves` (bytes) that it can get; raises OSError where it gets none. `readable`: where
        no region lies, zeros are read; else a read there ends the process."""
        self._blank_protection = mmap.PROT_READ if readable else 0
        self._arena = _reserve(reserves)
        reserve = len(self._arena)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self.mover: Mover = make(self._arena, self._base)
        """How it copies."""
        self._sizes: dict[int, int] = {}
        """Mapped: offset -> bytes, whole pages."""
        self._files: dict[int, int] = {}
        """Of what is mapped: offset -> file descriptor of its own, for those who must map it too."""
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
        kept = os.dup(fd)
        try:
            self._map(at, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            os.close(kept)
            raise
        self._sizes[at] = length
        self._files[at] = kept
        self._gaps[index : index + 1] = [(at + needed, room - needed)] if room > needed else []
        return at

    def unmap(self, offset: int) -> None:
        """Takes a region out; nothing may copy from or to it any more."""
        length = self._sizes.pop(offset)
        os.close(self._files.pop(offset))
        self._blank(offset, length)
        bisect.insort(self._gaps, (offset, length + _GUARD))
        merged: list[tuple[int, int]] = []
        for at, room in self._gaps:
            if merged and sum(merged[-1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((at, room))
        self._gaps = merged

    def move(self, dst: Offsets, src: Offsets, length: Offsets, stop: Stop | None = None) -> int:
        """Copies runs between arena offsets; the bytes copied, fewer only where `stop` was set.

        All of them lie in mapped regions: a caller that has not checked that may end the process.
        """
        return self.mover.move(dst, src, length, stop or Stop())

    def file(self, offset: int) -> int:
        """The file that is mapped there, for a process that must map it too; the arena's own, do not close it."""
        return self._files[offset]

    def address(self, offset: int) -> int:
        """Where an offset is in this process."""
        return self._base + offset

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a region, for tests and tools; release it before `close`."""
        return memoryview(self._arena)[offset : offset + size]

    def close(self) -> None:
        """Unmaps everything; safe twice."""
        if not self._arena.closed:
            self._sizes.clear()
            while self._files:
                os.close(self._files.popitem()[1])
            self._arena.close()

    def _blank(self, offset: int, length: int) -> None:
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(offset, length, self._blank_protection, anonymous, -1)

    def _map(self, offset: int, length: int, prot: int, flags: int, fd: int) -> None:
        if _mmap(self._base + offset, length, prot, flags, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
