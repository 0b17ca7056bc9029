"""The simulator: a fleet, requests and their arrivals in; each request's latencies out. Pure and deterministic.

outcome = simulate(Fleet(split(1, 1), Mode.WRITE), [Job(2000, 1000)] * 100, arrivals)
outcome.attainment(Slo(ttft=1.0, itl=0.05))
"""

import math
from collections.abc import Sequence

from pdserve.planner.simulator.engine import Engine
from pdserve.planner.simulator.fleet import (
    EngineDies,
    EngineReturns,
    EngineSpec,
    Fleet,
    Handover,
    Happening,
    Job,
    Mode,
    Role,
    RoleChanges,
    Routing,
    split,
)
from pdserve.planner.simulator.outcome import Outcome, Served, p99_of
from pdserve.planner.simulator.runs import Spent
from pdserve.planner.simulator.world import World
from pdserve.rpc.errors import ConfigError

__all__ = [
    "Engine",
    "EngineDies",
    "EngineReturns",
    "EngineSpec",
    "Fleet",
    "Handover",
    "Happening",
    "Job",
    "Mode",
    "Outcome",
    "Role",
    "RoleChanges",
    "Routing",
    "Served",
    "Spent",
    "p99_of",
    "simulate",
    "split",
]


def simulate(
    fleet: Fleet,
    jobs: Sequence[Job],
    arrivals: Sequence[float] | None = None,
    *,
    concurrency: int | None = None,
    happenings: Sequence[Happening] = (),
    jump: bool = True,
) -> Outcome:
    """Serves all jobs.

    Args:
        fleet: who serves.
        jobs: what is asked, in the order of sending.
        arrivals: when each is sent, seconds from the start, ascending; None: all at 0.
        concurrency: most in flight; the others are sent, in order, when one is done. None: no bound.
        happenings: faults and changes of roles.
        jump: False takes every step by itself: the same results, slowly.

    Raises:
        ConfigError: no jobs, arrivals that do not fit, a job that no engine can hold, an engine that is not there.
    """
    times = [0.0] * len(jobs) if arrivals is None else [float(at) for at in arrivals]
    if not jobs:
        raise ConfigError("nothing to simulate: there are no jobs")
    if len(times) != len(jobs):
        raise ConfigError(f"{len(jobs)} jobs, but {len(times)} arrivals")
    if not all(math.isfinite(at) and at >= 0 for at in times) or times != sorted(times):
        raise ConfigError("arrivals must ascend from 0 or later")
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
    for happening in happenings:
        if not 0 <= happening.engine < len(fleet.roles) or not (math.isfinite(happening.at) and happening.at >= 0):
            raise ConfigError(f"no such engine, or no such time: {happening}")
    _check_fits(fleet, jobs)
    world = World(fleet, jobs, times, concurrency, happenings, jump=jump)
    world.run()
    return Outcome(world)


def _check_fits(fleet: Fleet, jobs: Sequence[Job]) -> None:
    """The longest request must fit into an empty engine of each role."""
    longest = max(job.prompt + job.output for job in jobs)
    answering = fleet.both if fleet.mode is Mode.COLOCATED else fleet.decode
    room = min([answering.kv_tokens] + ([fleet.both.kv_tokens] if Role.BOTH in fleet.roles else []))
    if longest > room:
        raise ConfigError(f"a request of {longest} tokens does not fit into an engine's KV memory of {room}")
    # With faults, an attempt's prompt may be the whole prompt and all but one token of the answer.
    if fleet.mode is not Mode.COLOCATED and longest > fleet.prefill.kv_tokens:
        raise ConfigError(
            f"a request of {longest} tokens does not fit into a prefill engine's KV memory of {fleet.prefill.kv_tokens}"
        )
