"""Runs between regions that lie in several pieces of memory, each registered by itself. Pure; numpy only.

region  |<- piece 0 ->|<- piece 1 ->|        a run over a border is cut there
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.plan import Offsets, Runs


@dataclass(frozen=True, slots=True)
class Stretch:
    """Runs from one piece to one piece, in offsets into them."""

    src: int
    dst: int
    runs: Runs


def split(runs: Runs, src_sizes: Sequence[int], dst_sizes: Sequence[int]) -> Sequence[Stretch]:
    """The same bytes, by pair of pieces; runs that lie in both regions."""
    if len(src_sizes) == len(dst_sizes) == 1:
        return [Stretch(0, 0, runs)]
    ours, theirs = _Borders(src_sizes), _Borders(dst_sizes)
    src, dst, length = runs.src, runs.dst, runs.length
    columns: list[tuple[Offsets, Offsets, Offsets]] = []
    while len(length):  # once, but for runs over borders
        head = np.minimum(length, np.minimum(ours.room(src), theirs.room(dst)))
        columns.append((src, dst, head))
        left = length > head
        src, dst, length = (src + head)[left], (dst + head)[left], (length - head)[left]
    if not columns:
        return []
    src, dst, length = (np.concatenate([one[i] for one in columns]) for i in range(3))
    pairs = ours.piece(src) * len(dst_sizes) + theirs.piece(dst)
    order = np.argsort(pairs, kind="stable")
    ends = np.flatnonzero(np.diff(pairs[order])) + 1
    found = []
    for rows in np.split(order, ends):
        i, j = divmod(int(pairs[rows[0]]), len(dst_sizes))
        found.append(Stretch(i, j, Runs(src[rows] - ours.starts[i], dst[rows] - theirs.starts[j], length[rows])))
    return found


class _Borders:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.ends = np.cumsum(np.array(sizes, np.uint64))
        self.starts = self.ends - np.array(sizes, np.uint64)

    def piece(self, offsets: Offsets) -> NDArray[np.int64]:
        return np.searchsorted(self.starts, offsets, side="right").astype(np.int64) - 1

    def room(self, offsets: Offsets) -> Offsets:
        room: Offsets = self.ends[self.piece(offsets)] - offsets
        return room
