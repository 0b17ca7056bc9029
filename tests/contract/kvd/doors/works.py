"""Whether what went wrong at one door has harmed those who came through another."""

import os

from pdserve.kvd.client import Accept, Offer, Outcome
from pdserve.kvd.testing import FakeEngine, RunningKvd
from pdserve.kvd.types import Mode


async def works(kvd: RunningKvd) -> bool:
    """Whether a hand-over still works."""
    async with FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        landed = (await d.end_of("d")).outcome is Outcome.LANDED
        return landed and p.memory[0].prompt((1,)) == d.memory[0].prompt((2,))
