"""The copying of runs inside an arena: compiled where the installation could compile it, else from Python.

`copy.c` has the compiled loop; hatch_build.py compiles it when the package is built. One call copies
a whole list of runs without the interpreter lock. Where there was no C compiler, `mmap.move` is called
run by run, at little more than half the speed and under the lock for up to 1 MiB (some 200 µs) at a time.
"""

import collections
import ctypes
import hashlib
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from pdserve.kvd.plan import Offsets

SOURCE: Final = Path(__file__).with_name("copy.c")
LIBRARY: Final = Path(__file__).with_name("libcopy.so")

_LONG_RUN: Final = 256 << 10
"""From here on even Python copies a run without the interpreter lock."""
_BATCH_BYTES: Final = 1 << 20


class Stop:
    """A flag that ends a copy early; seen from C as well, and set from any thread."""

    __slots__ = ("flag",)

    def __init__(self, flag: ctypes.c_int32 | None = None) -> None:
        """`flag` may lie somewhere special; not zero means stop."""
        self.flag = flag if flag is not None else ctypes.c_int32(0)

    def set(self) -> None:
        """Asks the copy to end; safe at any time."""
        self.flag.value = 1

    def is_set(self) -> bool:
        """Whether it was asked to."""
        return self.flag.value != 0


class Mover(Protocol):
    """A way to copy within one mapping."""

    @property
    def name(self) -> str:
        """For operators."""
        ...

    @property
    def slow_because(self) -> str:
        """Why it is not the compiled one; empty where it is."""
        ...

    def move(self, dst: Offsets, src: Offsets, length: Offsets, stop: Stop) -> int:
        """Copies runs between offsets, which the caller has checked; the bytes copied.

        No source overlaps a destination. `stop` is looked at before the first byte and after every
        1 MiB; when it is set, the rest is left out.
        """
        ...


MakeMover = Callable[[mmap.mmap, int], Mover]
"""Of a mapping and its address."""


def load(library: Path = LIBRARY, source: Path = SOURCE) -> ctypes.CDLL:
    """The compiled loop.

    Raises:
        ImportError: it is not there, is not for this machine, or was built from another `copy.c`.
    """
    try:
        loaded = ctypes.CDLL(str(library))
        built_from = loaded.pdserve_copy_source
        built_from.restype = ctypes.c_char_p
        if built_from() != hashlib.sha256(source.read_bytes()).hexdigest().encode():
            raise ImportError(f"{library.name} was built from another {source.name}: install pdserve again")
        copy = loaded.pdserve_copy
    except (OSError, AttributeError) as error:
        raise ImportError(f"no compiled copy loop (was there a C compiler at installation?): {error}") from error
    offsets = ctypes.c_void_p
    copy.restype = ctypes.c_uint64
    copy.argtypes = [
        ctypes.c_void_p,
        offsets,
        offsets,
        offsets,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_int32),
    ]
    return loaded


def make_mover(arena: mmap.mmap, base: int) -> Mover:
    """The compiled one where it can be loaded, else the one in Python, which says why."""
    try:
        return CompiledMover(base, load(LIBRARY, SOURCE))
    except ImportError as error:
        return PythonMover(arena, base, slow_because=str(error))


class CompiledMover:
    """See Mover. The whole list is one call, without the interpreter lock."""

    name: Final = "compiled"
    slow_because: Final = ""

    def __init__(self, base: int, library: ctypes.CDLL) -> None:
        self._base = base
        self._copy = library.pdserve_copy

    def move(self, dst: Offsets, src: Offsets, length: Offsets, stop: Stop) -> int:
        """See Mover."""
        lists = [np.ascontiguousarray(column, np.uint64) for column in (dst, src, length)]
        moved: int = self._copy(self._base, *(c.ctypes.data for c in lists), len(length), ctypes.byref(stop.flag))
        return moved


class PythonMover:
    """See Mover. `mmap.move` costs 0.3 µs a call where a ctypes memmove costs 0.8 µs."""

    name: Final = "python"

    def __init__(self, arena: mmap.mmap, base: int, slow_because: str) -> None:
        self.slow_because = slow_because
        self._arena = arena
        self._base = base

    def move(self, dst: Offsets, src: Offsets, length: Offsets, stop: Stop) -> int:
        """See Mover."""
        to, at, count = dst.tolist(), src.tolist(), length.tolist()
        ends = np.cumsum(length)
        low = moved = 0
        while low < len(count) and not stop.is_set():
            if count[low] >= _LONG_RUN:
                moved += self._move_long(to[low], at[low], count[low], stop)
                low += 1
            else:
                high = max(low + 1, int(np.searchsorted(ends, np.uint64(moved + _BATCH_BYTES), side="right")))
                collections.deque(map(self._arena.move, to[low:high], at[low:high], count[low:high]), maxlen=0)
                moved = int(ends[high - 1])
                low = high
        return moved

    def _move_long(self, dst: int, src: int, length: int, stop: Stop) -> int:
        moved = 0
        while moved < length and not stop.is_set():
            part = min(_BATCH_BYTES, length - moved)
            ctypes.memmove(self._base + dst + moved, self._base + src + moved, part)
            moved += part
        return moved
