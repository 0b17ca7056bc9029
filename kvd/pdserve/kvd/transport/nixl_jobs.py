"""A copy as the nixl process makes it: its chunks, and those in flight. Pure: nixl and the clock are given."""

import collections
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.chunks import Cutter, Pace


class Reading(Protocol):
    """A read that was begun: nixl_agent.Read."""

    @property
    def nbytes(self) -> int:
        """How many bytes it brings."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether it was over when it was begun."""
        ...

    def done(self) -> bool:
        """Whether every byte is in place. Raises TransferFailed."""
        ...


class Reader(Protocol):
    """Who reads: nixl_agent.Agent."""

    def read(self, peer: str, src: Offsets, dst: Offsets, length: Offsets) -> Reading:
        """Begins to read from addresses of the peer to addresses of this process. Raises TransferFailed."""
        ...


class Job:
    """See the module."""

    def __init__(self, asked: wire.Copy, address: int, began: float) -> None:
        """`address`: where the region is that the bytes go to. `began`: now, in seconds of the clock."""
        self.copy_id = asked.copy_id
        self.cancelled = False
        self.moved = 0
        """Bytes that are in place."""
        self.began = began
        """When it became the first."""
        self._peer = asked.peer
        self._reads: collections.deque[Reading] = collections.deque()
        """In flight."""
        self._at_once = True
        src, dst, length = (np.frombuffer(column, np.uint64) for column in (asked.src, asked.dst, asked.length))
        runs = Runs(src + np.uint64(asked.base), dst + np.uint64(address), length)
        self.total = runs.total
        self._left = Cutter(runs)

    @property
    def over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return not self._reads and (self.cancelled or self._left.over)

    def step(self, reader: Reader, pace: Pace, clock: Callable[[], float]) -> bool:
        """Fills the window and looks once at what is in it; whether a read was done. Raises TransferFailed."""
        self._fill(reader, pace)
        before = len(self._reads)
        while self._reads and self._reads[0].done():
            read = self._reads.popleft()
            self.moved += read.nbytes
            self._at_once &= read.at_once
        news = len(self._reads) < before
        if news:
            pace.seen(self.moved, clock() - self.began, at_once=self._at_once)
        return news

    def _fill(self, reader: Reader, pace: Pace) -> None:
        while not self.cancelled and len(self._reads) < pace.window:
            chunk = self._left.next(pace.chunk_bytes)
            if chunk is None:
                return
            self._reads.append(reader.read(self._peer, *chunk))
