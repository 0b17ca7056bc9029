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

ALIGNMENT: Final = 16
"""Bytes of which everything that is copied on a device is a multiple: one load of one thread."""
LONGEST: Final = 1 << 20
"""Bytes of a run that a device is given: it spreads its work evenly over runs, not over bytes."""
_AT_ONCE: Final = 1 << 14
"""Runs that are looked at together."""
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
    """The same bytes, in order, in lists of at most `most` bytes, or of one run; runs of at most `longest` bytes."""
    low = 0
    while low < len(runs):
        some = slice(low, low + _AT_ONCE)  # not all: the device waits for the first batch
        part = Runs(runs.src[some], runs.dst[some], runs.length[some])
        low += len(part)
        if int(part.length.max()) > longest:
            part = _shortened(part, np.uint64(longest))
        ends = np.cumsum(part.length)
        begin = 0
        while begin < len(part):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, np.uint64(before + most), side="right")))
            yield Runs(part.src[begin:end], part.dst[begin:end], part.length[begin:end])
            begin = end


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
        """For a search by halves: two rows of a power of two, where pieces begin in the region and their addresses."""
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
    return not bool(((runs.src | runs.dst | runs.length) & np.uint64(ALIGNMENT - 1)).any())


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


def _shortened(runs: Runs, longest: np.uint64) -> Runs:
    counts = ((runs.length + longest - np.uint64(1)) // longest).astype(np.int64)
    first = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(runs)), counts)
    skip = (np.arange(len(run)) - first[run]).astype(np.uint64) * longest
    return Runs(runs.src[run] + skip, runs.dst[run] + skip, np.minimum(longest, runs.length[run] - skip))
