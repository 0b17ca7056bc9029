"""Cuts a copy into chunks small enough that a cancelled one ends soon. Pure; numpy only.

runs    [------ 2.5 MiB ------][4 KiB][4 KiB]...
pieces  [1 MiB  ][1 MiB  ][½  ][4 KiB][4 KiB]...
chunks  '-----------------''---------------- ... as long as is asked for each time
"""

from typing import Final

import numpy as np

from pdserve.kvd.plan import Offsets, Runs

PIECE_BYTES: Final = 1 << 20
"""The longest descriptor, and the shortest chunk that may be asked for."""
WINDOW: Final = 2
"""Chunks in flight: the next one waits while one is on the way."""
_CHUNK_S: Final = 0.004
"""What a chunk should take: a cancelled copy ends within the window."""
_ALONE_S: Final = 0.016
"""The same where a chunk is alone: nothing hides what each costs beside its bytes, over cma some 0.2 ms."""
_LONGEST_BYTES: Final = 64 << 20


class Cutter:
    """Hands out lists of (source, destination, length) that together are the runs, in their order."""

    def __init__(self, runs: Runs, piece: int = PIECE_BYTES) -> None:
        self._src, self._dst, self._length = _pieces(runs, np.uint64(piece))
        self._ends = np.cumsum(self._length)
        self._low = 0

    @property
    def over(self) -> bool:
        """Whether all was handed out."""
        return self._low == len(self._length)

    def next(self, limit: int, pieces: int | None = None) -> tuple[Offsets, Offsets, Offsets] | None:
        """At most `limit` bytes, which is at least a piece, in at most so many pieces; None after the last."""
        low = self._low
        if self.over:
            return None
        done = self._ends[low - 1] if low else np.uint64(0)
        high = int(np.searchsorted(self._ends, done + np.uint64(limit), side="right"))
        self._low = high = high if pieces is None else min(high, low + pieces)
        return self._src[low:high], self._dst[low:high], self._length[low:high]


class Pace:
    """How long chunks are to be, by how fast copies are, and how many are to be in flight."""

    def __init__(self) -> None:
        self.chunk_bytes = 4 * PIECE_BYTES
        self.window = WINDOW

    def seen(self, moved: int, seconds: float, *, at_once: bool = False) -> None:
        """A copy has moved so many bytes since it began. `at_once`: each of its chunks was over when it was begun, as
        where whoever begins one copies it (cma); a second one in flight would begin no sooner."""
        if moved > PIECE_BYTES and seconds > 0:  # a shorter one measures the way there and back
            self.window = 1 if at_once else WINDOW
            length = int(moved / seconds * (_ALONE_S if at_once else _CHUNK_S))
            self.chunk_bytes = min(max(length, PIECE_BYTES), _LONGEST_BYTES)


def _pieces(runs: Runs, limit: np.uint64) -> tuple[Offsets, Offsets, Offsets]:
    if not len(runs) or runs.length.max() <= limit:
        return runs.src, runs.dst, runs.length
    counts = ((runs.length + limit - np.uint64(1)) // limit).astype(np.int64)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(len(firsts), dtype=np.int64) - firsts).astype(np.uint64) * limit
    left = np.repeat(runs.length, counts) - within
    return np.repeat(runs.src, counts) + within, np.repeat(runs.dst, counts) + within, np.minimum(left, limit)
