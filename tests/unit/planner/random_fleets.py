"""Random fleets, requests and happenings out of one seed, for tests of the simulator."""

import random
from dataclasses import dataclass
from typing import Any

from pdserve.costmodel import CostModel
from pdserve.planner.simulator import (
    EngineDies,
    EngineReturns,
    EngineSpec,
    Fleet,
    Handover,
    Happening,
    Job,
    Mode,
    Outcome,
    Role,
    RoleChanges,
    Routing,
    simulate,
    split,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of `simulate`."""

    fleet: Fleet
    jobs: list[Job]
    arrivals: list[float]
    concurrency: int | None
    happenings: list[Happening]

    def run(self, *, jump: bool = True) -> Outcome:
        """Simulates it."""
        more: dict[str, Any] = {"concurrency": self.concurrency, "happenings": self.happenings, "jump": jump}
        return simulate(self.fleet, self.jobs, self.arrivals, **more)


def random_case(seed: int, *, mode: Mode | None = None, faults: bool = False, tight: bool = True) -> Case:
    """`tight`: KV memory for few requests, so that engines preempt. With `faults` every engine is back in the end."""
    rng = random.Random(seed)
    mode = rng.choice(list(Mode)) if mode is None else mode
    if mode is Mode.COLOCATED:
        roles: tuple[Role, ...] = (Role.BOTH,) * rng.randint(1, 3)
    else:
        roles = split(rng.randint(1, 3), rng.randint(1, 3)) + (Role.BOTH,) * rng.randint(0, 1)
    most = 120
    fleet = Fleet(
        roles,
        mode,
        _spec(rng, most, tight),
        _spec(rng, most, tight),
        _spec(rng, most, tight),
        Handover(
            serialization=rng.choice([0.0, rng.uniform(0, 0.05)]),
            tail=rng.choice([0.0, rng.uniform(0, 0.05)]),
            bytes_per_token=rng.choice([0.0, 1000.0]),
            bandwidth=rng.choice([float("inf"), rng.uniform(2e5, 5e6)]),
            layers=rng.choice([1, 8]),
            first_token=rng.choice([Role.DECODE, Role.PREFILL]),
        ),
        dispatch=rng.choice([0.0, 0.01]),
        egress=rng.choice([0.0, 0.002]),
        routing=rng.choice(list(Routing)),
        headroom=rng.choice([0, 8, 256]),
    )
    jobs = [_job(rng, most) for _ in range(rng.randint(1, 60))]
    at, arrivals = 0.0, []
    gap = rng.choice([0.0, 0.01, 0.2])
    for _ in jobs:
        at += rng.expovariate(1 / gap) if gap else 0.0
        arrivals.append(at)
    happenings: list[Happening] = []
    for _ in range(rng.randint(1, 4) if faults else 0):
        engine, when = rng.randrange(len(roles)), rng.uniform(0, at + 2)
        happenings += [EngineDies(when, engine), EngineReturns(when + rng.uniform(0, 1), engine)]
    if faults and mode is not Mode.COLOCATED and len(roles) > 2:
        # Away from its role and back, so that all roles are there in the end.
        when = rng.uniform(0, at + 1)
        first = roles[0]
        happenings += [RoleChanges(when, 0, Role.DECODE), RoleChanges(when + rng.uniform(0, 1), 0, first)]
    concurrency = rng.choice([None, None, rng.randint(1, 20)])
    return Case(fleet, jobs, arrivals, concurrency, sorted(happenings, key=lambda h: h.at))


def _spec(rng: random.Random, most: int, tight: bool) -> EngineSpec:
    cost = CostModel(
        prefill_base=rng.uniform(0, 0.05),
        prefill_per_token=rng.uniform(0, 1e-3),
        decode_base=rng.uniform(1e-3, 0.03),
        decode_per_seq=rng.uniform(0, 1e-3),
        decode_per_context_token=rng.choice([0.0, rng.uniform(0, 1e-5)]),
        mixed_base=rng.uniform(0, 0.03),
        mixed_per_token=rng.uniform(0, 1e-3),
    )
    seqs = rng.randint(2, 40)
    kv = rng.randint(2 * most, 6 * most) if tight else 1_000_000
    return EngineSpec(cost, token_budget=seqs + rng.randint(0, 100), max_seqs=seqs, kv_tokens=kv)


def _job(rng: random.Random, most: int) -> Job:
    prompt, output = rng.randint(1, most), rng.choice([1, 2, rng.randint(1, most)])
    return Job(prompt, output, hit=rng.choice([0, rng.randint(0, prompt)]), decode_hit=rng.choice([0, prompt // 2]))
