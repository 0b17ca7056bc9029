"""Lists of byte ranges to copy, and how neighbours become one. Pure; numpy only."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Columns: TypeAlias = tuple[Offsets, Offsets, Offsets]


class Runs:
    """Byte ranges to copy: `length[i]` bytes from `src[i]` to `dst[i]`, offsets into the regions."""

    def __init__(self, src: Offsets, dst: Offsets, length: Offsets) -> None:
        self._columns = (src, dst, length)
        self._total: int | None = None

    @property
    def src(self) -> Offsets:
        """Where each begins in the source."""
        return self._made()[0]

    @property
    def dst(self) -> Offsets:
        """Where each begins in the destination."""
        return self._made()[1]

    @property
    def length(self) -> Offsets:
        """Bytes of each."""
        return self._made()[2]

    @property
    def total(self) -> int:
        """Bytes in all."""
        if self._total is None:  # it is asked for more often than once, where microseconds count
            self._total = int(self.length.sum())
        return self._total

    def __len__(self) -> int:
        return len(self.length)

    def listed(self) -> "Runs":
        """The same, and what is to be made of it is made: for who has the time now."""
        self._made()
        return self

    def _made(self) -> Columns:
        return self._columns


class Repeated(Runs):
    """The same few runs once for each of many places, as a prompt's blocks are in each layer.

        pattern  |a| |b|      at places 0, 100, 200:      |a| |b|     |a| |b|     |a| |b|

    The lists of a `Runs` are made when they are first asked for, neighbours joined; who can copy a pattern (a device's
    kernel) does without them: they are as many times as long as there are layers.
    """

    def __init__(self, pattern: Runs, src_at: Offsets, dst_at: Offsets) -> None:
        """`pattern[i]` is copied from `src_at[k] + src[i]` to `dst_at[k] + dst[i]` for each k. Nothing is empty."""
        self._lists: Columns | None = None
        self.pattern = pattern
        self.src_at = src_at
        self.dst_at = dst_at

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.pattern.total * len(self.src_at)

    def _made(self) -> Columns:
        if self._lists is None:
            pattern, ends = self.pattern, ((self.src_at, self.pattern.src), (self.dst_at, self.pattern.dst))
            src, dst = ((at[:, None] + offsets).ravel().view(np.int64) for at, offsets in ends)
            runs = merge(src, dst, np.tile(pattern.length, len(self.src_at)).view(np.int64))
            self._lists = runs.src, runs.dst, runs.length
        return self._lists


_HERE = np.zeros(1, np.uint64)


def once(runs: Runs) -> Repeated:
    """The same runs as a pattern; lists as one at one place."""
    return runs if isinstance(runs, Repeated) else Repeated(runs, _HERE, _HERE)


def leaves(offset: Offsets, length: Offsets, size: int) -> bool:
    """Whether one of these ranges does not lie within 0 and `size`."""
    # Not offset + length, which could wrap: what is let through here is copied without another check.
    return bool((length > size).any() or (offset > np.uint64(size) - length).any())


def nothing() -> Runs:
    """No runs."""
    empty = np.empty(0, dtype=np.uint64)
    return Runs(empty, empty, empty)


def joined(src: Numbers, dst: Numbers, length: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The same ranges (at least one), in order of their sources, those that touch on both sides as one."""
    if (src[1:] < src[:-1]).any():  # most plans are made in order
        order = np.argsort(src, kind="stable")
        src, dst, length = src[order], dst[order], length[order]
    touch = (src[:-1] + length[:-1] == src[1:]) & (dst[:-1] + length[:-1] == dst[1:])
    starts = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    return src[starts], dst[starts], np.add.reduceat(length, starts)


def merge(src: Numbers, dst: Numbers, length: Numbers) -> Runs:
    """Runs of these ranges, of which there is at least one."""
    return Runs(*(values.view(np.uint64) for values in joined(src, dst, length)))
