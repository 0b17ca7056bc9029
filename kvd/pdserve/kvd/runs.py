"""Lists of byte ranges to copy, and how neighbours become one. Pure; numpy only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.uint64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges to copy: `length[i]` bytes from `src[i]` to `dst[i]`, offsets into the regions."""

    src: Offsets
    dst: Offsets
    length: Offsets

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)


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
    return Runs(*(values.astype(np.uint64) for values in joined(src, dst, length)))
