"""The process that nixl lives in: `python -m pdserve.kvd.transport.nixl_worker`, started by nixl_process.

It owns one agent and its own mappings of the regions that it was given, and reads for one peer or serves
them all. Whatever becomes of UCX becomes of this process alone: it ends at the first failed read, since only
its end says that nothing of it writes any more, and with kvd. One thread; it sleeps unless something is in flight.
"""

import collections
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child_worker import NAP_S, SAY_EVERY_S, SPINS, Channel, live
from pdserve.kvd.transport.chunks import Pace
from pdserve.kvd.transport.nixl_agent import Agent
from pdserve.kvd.transport.nixl_jobs import Job
from pdserve.kvd.transport.nixl_wire import Asked, Load, decode_asked
from pdserve.rpc.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Region:
    """A region as this process has it mapped."""

    offset: int
    address: int
    registered: Any


class Worker:
    """See the module."""

    def __init__(self, agent: Agent, kvd: Channel) -> None:
        self._agent = agent
        self._kvd = kvd
        # A read that comes late, for what was there, gets zeros; without, UCX's copy of it would end this process.
        self._arena = Arena(readable=True)
        self._regions: dict[str, Region] = {}
        self._jobs: collections.deque[Job] = collections.deque()
        self._pace = Pace()

    def run(self) -> None:
        """Serves until kvd is gone, or a read fails."""
        self._kvd.say(wire.Answer(0))
        idle = 0
        while self._kvd.open:
            self._hear(None if not self._jobs else NAP_S if idle > SPINS else 0.0)
            if self._jobs and self._kvd.open:
                idle = 0 if self._step(self._jobs[0]) else idle + 1

    def _step(self, job: Job) -> bool:
        news = job.step(self._agent, self._pace, time.monotonic)
        if job.over:
            self._jobs.popleft()
            now = time.monotonic()
            self._kvd.say(wire.Ended(job.copy_id, job.moved, int((now - job.began) * 1e9), job.moved < job.total))
            if self._jobs:
                self._jobs[0].began = now
        elif news and time.monotonic() - max(self._kvd.said, job.began) > SAY_EVERY_S:
            self._kvd.say(wire.Moving(job.copy_id))
        return news

    def _hear(self, wait: float | None) -> None:
        for message in self._kvd.hear(wait):
            match message:
                case wire.Call(call_id, what):
                    self._kvd.say(self._answer(call_id, decode_asked(what)))
                case wire.Copy() as asked:
                    self._jobs.append(Job(asked, self._regions[asked.region].address, time.monotonic()))
                case wire.Cancel(copy_id):
                    self._cancel(copy_id)
                case wire.Retire(reason):
                    raise TransferFailed(reason)

    def _cancel(self, copy_id: int) -> None:
        """The first copy ends with its reads; one behind it has none, and ends now."""
        for job in self._jobs:
            if job.copy_id == copy_id:
                job.cancelled = True
                if job is not self._jobs[0]:
                    self._jobs.remove(job)
                    self._kvd.say(wire.Ended(copy_id, 0, 1, True))
                return

    def _answer(self, call_id: int, what: Asked) -> wire.Answer:
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
                case Load(metadata):
                    return wire.Answer(call_id, self._agent.load(metadata).encode())
        except (TransferFailed, OSError, ValueError) as error:
            return wire.Answer(call_id, error=str(error) or type(error).__name__)
        return wire.Answer(call_id)

    def _map(self, name: str, size: int) -> Region:
        fd = self._kvd.file()
        try:
            offset = self._arena.map(fd, size)
        finally:
            os.close(fd)
        address = self._arena.address(offset)
        try:
            region = self._regions[name] = Region(offset, address, self._agent.register(address, size))
        except TransferFailed:
            self._arena.unmap(offset)
            raise
        return region


def work(kvd: Channel, args: Sequence[str]) -> None:
    """`NAME POLL|-`."""
    name, poll = args
    Worker(Agent(name, None if poll == "-" else float(poll)), kvd).run()


if __name__ == "__main__":
    sys.exit(live(sys.argv[1:], work))
