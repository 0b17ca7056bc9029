"""From byte ranges of regions to addresses of a device. Pure; numpy only.

A region of device memory is its pieces one behind the other, wherever they lie:

    region   |<- piece 0 ->|<- piece 1 ->|<- piece 2 ->|
    address  0x7f..a000     0x7f..1000    0x7f..9000

A run may lie over the border of two pieces. The kernel finds that out by itself, from a table of the pieces; who
needs whole addresses (`parts_of`) has such runs cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.runs import Repeated, leaves, once

ALIGNMENT: Final = 16
"""Bytes of which everything that is copied on a device is a multiple: one load of one thread."""
LONGEST: Final = 1 << 20
"""Bytes of a run that a device is given: it spreads its work evenly over runs, not over bytes."""
_AT_ONCE: Final = 1 << 14
"""Runs that are looked at together, and no batch is longer: a host prepares so many while an H200 copies as many of 16
KiB."""
_FIRST_BYTES: Final = 256 << 20
"""Of a copy's first batch: less, and an H200 is done with it before the host is with the next."""
_LEAST_WIDTH: Final = 7
_BEYOND: Final = 1 << 62
"""Behind every region's end."""


@dataclass(frozen=True, slots=True)
class Parts:
    """`length[i]` bytes from address `src[i]` to address `dst[i]`, all multiples of ALIGNMENT."""

    src: Offsets
    dst: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)


def batches(runs: Runs, most: int, longest: int = LONGEST) -> Iterator[Runs]:
    """The same bytes in parts of at most `most` bytes, or of one run; runs of at most `longest` bytes.

    A list goes in order, and its first part is shorter: a device waits for that one only, and is busy with each while
    the next is made ready. A pattern goes to as many of its places at a time as may be.
    """
    if isinstance(runs, Repeated):
        pattern = runs.pattern
        if runs.total <= most and len(pattern) <= _AT_ONCE and int(pattern.length.max()) <= longest:
            yield runs
            return
        for pattern in _batches(runs.pattern, most, most, longest):
            step = max(1, most // pattern.total)
            for low in range(0, len(runs.src_at), step):
                yield Repeated(pattern, runs.src_at[low : low + step], runs.dst_at[low : low + step])
    else:
        yield from _batches(runs, min(most, _FIRST_BYTES), most, longest)


def _batches(runs: Runs, first: int, most: int, longest: int) -> Iterator[Runs]:
    low, limit = 0, first
    while low < len(runs):
        size = int(runs.length[low])
        part = _some(runs, low, low + min(_AT_ONCE, max(1, limit // max(size, 1))))
        if size <= longest and bool((part.length == size).all()):
            yield part  # the rule: blocks of one size, for which there is nothing to add up
        else:
            part = _some(runs, low, low + _AT_ONCE)
            yield from _cut(part, limit, longest)
        low, limit = low + len(part), most


class Place:
    """Where a region's pieces are."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        ends = np.cumsum(np.array(sizes, np.uint64))
        self.size = int(ends[-1])
        """Bytes."""
        self._starts = ends - np.array(sizes, np.uint64)
        self._ends = ends
        self._addresses = np.array(addresses, np.uint64)

    def table(self) -> NDArray[np.int64]:
        """Two rows, a power of two long and filled up: where pieces begin in the region, and their addresses."""
        width = 1 << max(_LEAST_WIDTH, (len(self._starts)).bit_length())
        table = np.full((2, width), _BEYOND, np.int64)
        table[0, : len(self._starts)] = self._starts
        table[1, : len(self._starts)] = self._addresses
        return table

    def at(self, offsets: Offsets) -> Offsets:
        """Addresses of offsets that lie in the region."""
        piece = self._piece(offsets)
        found: Offsets = self._addresses[piece] + (offsets - self._starts[piece])
        return found

    def room(self, offsets: Offsets) -> Offsets:
        """Bytes from each offset to the end of its piece."""
        room: Offsets = self._ends[self._piece(offsets)] - offsets
        return room

    def _piece(self, offsets: Offsets) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        return np.searchsorted(self._starts, offsets, side="right") - 1


def aligned(runs: Runs) -> bool:
    """Whether every run is of multiples of ALIGNMENT."""
    whole = once(runs)
    columns = whole.pattern.src, whole.pattern.dst, whole.pattern.length, whole.src_at, whole.dst_at
    return not any(int(np.bitwise_or.reduce(column)) & (ALIGNMENT - 1) for column in columns)


def surely_inside(runs: Runs, src_size: int, dst_size: int) -> bool:
    """Whether no run leaves regions of these sizes; of a list False too where one may be too near to an end to be told
    so soon."""
    if isinstance(runs, Repeated):
        pattern = runs.pattern
        rooms = src_size - int(runs.src_at.max()), dst_size - int(runs.dst_at.max())
        ends = zip((pattern.src, pattern.dst), rooms, strict=True)
        return not any(leaves(offsets, pattern.length, room) for offsets, room in ends)
    if not len(runs):
        return True
    longest = int(runs.length.max())
    return int(runs.src.max()) + longest <= src_size and int(runs.dst.max()) + longest <= dst_size


def parts_of(runs: Runs, src: Place, dst: Place) -> Parts:
    """The addresses of runs that lie in their regions."""
    ours, theirs, length = runs.src, runs.dst, runs.length
    done: list[tuple[Offsets, Offsets, Offsets]] = []
    while len(length):  # once, but for runs over borders
        head = np.minimum(length, np.minimum(src.room(ours), dst.room(theirs)))
        done.append((src.at(ours), dst.at(theirs), head))
        left = length > head
        ours, theirs, length = (ours + head)[left], (theirs + head)[left], (length - head)[left]
    return Parts(*(np.concatenate([one[i] for one in done]) if done else length for i in range(3)))


def _some(runs: Runs, begin: int, end: int) -> Runs:
    return Runs(runs.src[begin:end], runs.dst[begin:end], runs.length[begin:end])


def _cut(runs: Runs, most: int, longest: int) -> Iterator[Runs]:
    if int(runs.length.max()) > longest:
        runs = _shortened(runs, np.uint64(longest))
    ends = np.cumsum(runs.length)
    begin = 0
    while begin < len(runs):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, np.uint64(before + most), side="right")))
        yield _some(runs, begin, end)
        begin = end


def _shortened(runs: Runs, longest: np.uint64) -> Runs:
    counts = ((runs.length + longest - np.uint64(1)) // longest).astype(np.int64)
    first = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(runs)), counts)
    skip = (np.arange(len(run)) - first[run]).astype(np.uint64) * longest
    return Runs(runs.src[run] + skip, runs.dst[run] + skip, np.minimum(longest, runs.length[run] - skip))
