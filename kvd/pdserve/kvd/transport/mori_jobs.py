"""The copies from one peer, in their order: cut into chunks, a few of them in flight, begun again where there was no
room. Pure: takes the time (seconds, monotonic) as an argument.

A read that was begun cannot be taken back. So a cancelled copy ends with its last chunk in flight, and a peer that
does not answer is `stalled`: its reads are over only with the process.
"""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.transport.chunks import WINDOW, Cutter, Pace
from pdserve.rpc.errors import TransferFailed

CHUNK_RUNS: Final = 2048
"""Work requests of a chunk at most: two of them are half of a queue (8192)."""
_BACK_OFF_S: Final = (100e-6, 0.02)
"""Until a chunk that found no room is begun again: first, and at most, doubling."""


class Full(Exception):
    """The queue to a peer has no room, and nothing of what was asked is under way; it is to be asked again."""


class Reading(Protocol):
    """A read that was begun; see mori_engine.Read."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        ...

    def done(self) -> bool:
        """Whether every byte is in place. Raises Full, TransferFailed."""
        ...


Begin = Callable[[Offsets, Offsets, Offsets], Reading]
"""Begins to read a chunk. Raises Full, TransferFailed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Runs that are asked for at once."""

    begin: Begin
    src: Offsets
    dst: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)

    def start(self) -> Reading:
        """Raises Full, TransferFailed."""
        return self.begin(self.src, self.dst, self.length)

    def cut(self, at: int) -> "tuple[Chunk, Chunk]":
        """The first so many runs, and the others."""
        columns = (self.src, self.dst, self.length)
        return (
            Chunk(self.begin, *(column[:at] for column in columns)),
            Chunk(self.begin, *(column[at:] for column in columns)),
        )


@dataclass(frozen=True, slots=True)
class Done:
    """A copy is terminal: `nbytes` are in place, and nothing of it is under way."""

    copy_id: int
    nbytes: int
    seconds: float
    cancelled: bool


class Job:
    """One copy."""

    def __init__(self, copy_id: int, parts: Sequence[tuple[Begin, Runs]]) -> None:
        """`parts`: what is read, and how each is."""
        self.copy_id = copy_id
        self.total = sum(runs.total for _, runs in parts)
        self.cancelled = False
        self.moved = 0
        self.began = 0.0
        self.reads: collections.deque[tuple[Reading, Chunk]] = collections.deque()
        self.again: collections.deque[Chunk] = collections.deque()
        """Chunks that found no room."""
        self._left = collections.deque((begin, Cutter(runs)) for begin, runs in parts)

    @property
    def over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return not self.reads and (self.cancelled or not (self._left or self.again))

    def next(self, limit: int, runs: int) -> Chunk | None:
        """What is to be begun next: at most so many bytes, in so many runs."""
        if self.again:
            chunk = self.again.popleft()
            if len(chunk) > runs:
                chunk, rest = chunk.cut(runs)
                self.again.appendleft(rest)
            return chunk
        while self._left:
            begin, cutter = self._left[0]
            columns = cutter.next(limit, runs)
            if columns is not None:
                return Chunk(begin, *columns)
            self._left.popleft()
        return None


class Peer:
    """The copies from one engine of another node."""

    def __init__(self, key: str, stall: float) -> None:
        """`stall`: seconds without a byte until a copy fails."""
        self.key = key
        self.failed = ""
        """Why nothing of it comes to an end any more, but with the process; empty else."""
        self._stall = stall
        self._jobs: collections.deque[Job] = collections.deque()
        self._news = 0.0
        self._retry = 0.0
        self._back_off = _BACK_OFF_S[0]
        self._pace = Pace()
        self._chunk_runs = CHUNK_RUNS

    @property
    def busy(self) -> bool:
        """Whether it has copies."""
        return bool(self._jobs)

    def add(self, job: Job, now: float) -> None:
        """Behind the others."""
        if not self._jobs:
            job.began = self._news = now
        self._jobs.append(job)

    def cancel(self, copy_id: int) -> Done | None:
        """Asks a copy to end early; what becomes of one that was not begun: it is terminal now, whatever is before it.
        The first one ends with its reads: those that failed may go on, also where none is known any more."""
        for job in self._jobs:
            if job.copy_id == copy_id:
                job.cancelled = True
                if job is self._jobs[0]:
                    return None
                self._jobs.remove(job)
                return Done(copy_id, 0, 0.0, True)
        return None

    def waited(self, seconds: float) -> None:
        """So long nobody looked, which is not the peer's fault."""
        self._news += seconds

    def step(self, now: float) -> tuple[bool, Sequence[Done]]:
        """Looks at what is in flight and begins more; whether there is news, and the copies that are terminal.

        Raises:
            TransferFailed: a read failed, or none came to an end for too long.
        """
        news, ended = False, []
        while self._jobs:
            job = self._jobs[0]
            news |= self._look(job, now)
            self._post(job, now)
            if not job.over:
                break
            ended.append(Done(job.copy_id, job.moved, now - job.began, job.moved < job.total))
            self._jobs.popleft()
            news = True
            if self._jobs:
                self._jobs[0].began = now
        if news:
            self._news = now
        elif self._jobs and now - self._news > self._stall:
            raise TransferFailed(f"no byte came for {self._stall:g} s from {self.key}")
        return news, ended

    def _look(self, job: Job, now: float) -> bool:
        news = False
        while job.reads:
            read, chunk = job.reads[0]
            try:
                if not read.done():
                    break
                job.moved += read.nbytes
                self._back_off = _BACK_OFF_S[0]
                self._chunk_runs = min(self._chunk_runs + 1 + self._chunk_runs // 8, CHUNK_RUNS)
                news = True
                job.reads.popleft()
            except Full:
                job.reads.popleft()
                self._no_room(job, chunk, now)
        if news:
            self._pace.seen(job.moved, now - job.began)
        return news

    def _post(self, job: Job, now: float) -> None:
        while not job.cancelled and len(job.reads) < WINDOW and now >= self._retry:
            chunk = job.next(self._pace.chunk_bytes, self._chunk_runs)
            if chunk is None:
                break
            try:
                job.reads.append((chunk.start(), chunk))
            except Full:
                self._no_room(job, chunk, now)

    def _no_room(self, job: Job, chunk: Chunk, now: float) -> None:
        job.again.appendleft(chunk)
        if not job.reads and len(chunk) > 1:  # nothing is in its way: the queue is shorter than that
            self._chunk_runs = len(chunk) // 2
            return
        self._retry = now + self._back_off
        self._back_off = min(2 * self._back_off, _BACK_OFF_S[1])
