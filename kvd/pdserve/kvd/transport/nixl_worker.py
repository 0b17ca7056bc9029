"""The process that nixl lives in: `python -m pdserve.kvd.transport.nixl_worker`, started by nixl_process.

It owns one agent and its own mappings of the regions that it was given, and reads for one peer or serves
them all. Whatever becomes of UCX becomes of this process alone: it ends at the first failed read, since only
its end says that nothing of it writes any more, and with kvd. One thread; it sleeps unless something is in flight.
"""

import collections
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport import nixl_wire as wire
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl_agent import Agent, Read
from pdserve.kvd.transport.nixl_chunks import PIECE_BYTES, Cutter
from pdserve.rpc.errors import TransferFailed

_CHUNK_S: Final = 0.004
"""What a chunk should take: a cancelled copy ends within two. Requests cost 0.1 ms each, over cma that is seen."""
_CHUNK_BYTES: Final = (PIECE_BYTES, 64 << 20)
_WINDOW: Final = 2
"""Chunks in flight: the next one waits while one is on the way."""
_SPINS: Final = 20
"""Looks without news before it sleeps between them."""
_NAP_S: Final = 50e-6
_SAY_EVERY_S: Final = 0.2
_RECEIVE_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Region:
    """A region as this process has it mapped."""

    offset: int
    address: int
    registered: Any


class Job:
    """A copy under way: its chunks, and the reads in flight."""

    def __init__(self, asked: wire.Copy, region: Region) -> None:
        self.copy_id = asked.copy_id
        self.peer = asked.peer
        self.cancelled = False
        self.moved = 0
        self.began = time.monotonic_ns()
        self.reads: collections.deque[Read] = collections.deque()
        src, dst, length = (np.frombuffer(column, np.uint64) for column in (asked.src, asked.dst, asked.length))
        runs = Runs(src + np.uint64(asked.base), dst + np.uint64(region.address), length)
        self.total = runs.total
        self._left: Cutter | None = Cutter(runs)

    def post(self, agent: Agent, chunk_bytes: int) -> None:
        """Fills the window. Raises TransferFailed."""
        while self._left is not None and not self.cancelled and len(self.reads) < _WINDOW:
            chunk = self._left.next(chunk_bytes)
            if chunk is None:
                self._left = None
            else:
                self.reads.append(agent.read(self.peer, *chunk))

    def look(self) -> bool:
        """Whether a read was done. Raises TransferFailed."""
        before = len(self.reads)
        while self.reads and self.reads[0].done():
            self.moved += self.reads.popleft().nbytes
        return len(self.reads) < before

    @property
    def over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return not self.reads and (self.cancelled or self._left is None)


class Worker:
    """See the module."""

    def __init__(self, agent: Agent, control: socket.socket, files: socket.socket) -> None:
        self._agent = agent
        self._control = control
        self._files = files
        # A read that comes late, for what was there, gets zeros; without, UCX's copy of it would end this process.
        self._arena = Arena(readable=True)
        self._frames = wire.Frames()
        self._regions: dict[str, Region] = {}
        self._jobs: collections.deque[Job] = collections.deque()
        self._said = 0.0
        self._chunk_bytes = 4 * PIECE_BYTES

    def run(self) -> None:
        """Serves until kvd is gone, or a read fails."""
        self._say(wire.Answer(0))
        idle = 0
        while self._hear(None if not self._jobs else _NAP_S if idle > _SPINS else 0.0):
            if self._jobs:
                idle = 0 if self._step(self._jobs[0]) else idle + 1

    def _step(self, job: Job) -> bool:
        job.post(self._agent, self._chunk_bytes)
        news = job.look()
        if news and job.moved > PIECE_BYTES:  # a shorter copy measures the way there and back
            rate = job.moved / (time.monotonic_ns() - job.began) * 1e9
            self._chunk_bytes = min(max(int(rate * _CHUNK_S), _CHUNK_BYTES[0]), _CHUNK_BYTES[1])
        if job.over:
            self._jobs.popleft()
            took = time.monotonic_ns() - job.began
            self._say(wire.Ended(job.copy_id, job.moved, took, job.moved < job.total))
            if self._jobs:
                self._jobs[0].began = time.monotonic_ns()
        elif news and time.monotonic() - self._said > _SAY_EVERY_S:
            self._say(wire.Moving(job.copy_id))
        return news

    def _hear(self, wait: float | None) -> bool:
        """Takes what has come; False once kvd is gone."""
        if not select.select([self._control], [], [], wait)[0]:
            return True
        data = self._control.recv(_RECEIVE_BYTES)
        for body in self._frames.feed(data):
            match wire.decode_to_worker(body):
                case wire.Call(call_id, what):
                    self._say(self._answer(call_id, what))
                case wire.Copy() as asked:
                    self._jobs.append(Job(asked, self._regions[asked.region]))
                case wire.Cancel(copy_id):
                    for job in self._jobs:
                        job.cancelled |= job.copy_id == copy_id
        return bool(data)

    def _answer(self, call_id: int, what: wire.Map | wire.Unmap | wire.Load) -> wire.Answer:
        try:
            match what:
                case wire.Map(name, size):
                    region = self._map(name, size)
                    return wire.Answer(call_id, self._agent.metadata(region.registered), region.address)
                case wire.Unmap(name):
                    gone = self._regions.pop(name, None)
                    if gone is not None:
                        self._agent.deregister(gone.registered)
                        self._arena.unmap(gone.offset)
                case wire.Load(metadata):
                    return wire.Answer(call_id, self._agent.load(metadata).encode())
        except (TransferFailed, OSError, ValueError) as error:
            return wire.Answer(call_id, error=str(error) or type(error).__name__)
        return wire.Answer(call_id)

    def _map(self, name: str, size: int) -> Region:
        _, fds, _, _ = socket.recv_fds(self._files, 1, 1)
        try:
            offset = self._arena.map(fds[0], size)
        finally:
            os.close(fds[0])
        address = self._arena.address(offset)
        try:
            region = self._regions[name] = Region(offset, address, self._agent.register(address, size))
        except TransferFailed:
            self._arena.unmap(offset)
            raise
        return region

    def _say(self, message: wire.FromWorker) -> None:
        self._said = time.monotonic()
        self._control.sendall(wire.framed(message))


def main(argv: Sequence[str]) -> int:
    """`NAME POLL|- PARENT CONTROL-FD FILES-FD`."""
    name, poll, parent, control_fd, files_fd = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # where it hangs in UCX it does not see the socket's end
    if os.getppid() != int(parent):
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; kvd still drains
    control = socket.socket(fileno=int(control_fd))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # kvd is gone
        try:
            agent = Agent(name, None if poll == "-" else float(poll))
            Worker(agent, control, socket.socket(fileno=int(files_fd))).run()
        except TransferFailed as error:
            control.sendall(wire.framed(wire.Broken(error.message)))
    sys.stderr.flush()
    # Not through the destructors: UCX's would go through what is in flight, and may end in its own abort.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
