"""Which split of a number of engines has the most goodput, by simulated runs of a given length. Pure, seeded."""

from dataclasses import dataclass

from pdserve.bench.slo import Slo
from pdserve.bench.workload.arrivals import like_vllm
from pdserve.planner.profile import Profile
from pdserve.planner.search import highest
from pdserve.planner.simulator import Fleet, Job, Mode, simulate
from pdserve.rpc.errors import ConfigError

TARGET = 0.9
"""Attainment that goodput asks for."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide the engines."""

    prefills: int
    """Engines for prefill."""
    decodes: int
    """Engines for decode."""
    goodput: float
    """Requests per second; 0 where even the lowest rate tried does not hold."""

    @property
    def label(self) -> str:
        """Such as `1P:2D`."""
        return f"{self.prefills}P:{self.decodes}D"


def goodput(
    fleet: Fleet, job: Job, slo: Slo, *, requests: int, seed: int = 0, target: float = TARGET, precision: float = 0.02
) -> float:
    """The highest rate, requests per second, at which `target` of `requests` requests meet the SLO.

    Found by doubling and bisection to a relative `precision`. A finite run with no warm-up: rates
    that a long run could not hold may pass a short one, so `requests` should span several answers.

    Raises:
        ConfigError: as simulate; a target outside (0, 1].
    """
    if not 0 < target <= 1:
        raise ConfigError(f"a target attainment of {target:g}: it must be above 0, and at most 1")

    def holds(rate: float) -> bool:
        arrivals = like_vllm(rate, 1.0, requests, seed)
        return simulate(fleet, [job] * requests, arrivals).attainment(slo) >= target

    return highest(holds, precision=precision)


def splits(
    profile: Profile, job: Job, slo: Slo, engines: int, *, mode: Mode, requests: int, seed: int = 0
) -> list[Split]:
    """All splits of `engines` engines, the best first; of equal ones that with fewer prefill engines.

    Raises:
        ConfigError: fewer than two engines; a profile without split roles.
    """
    if engines < 2:
        raise ConfigError(f"a split takes at least two engines, not {engines}")
    found = []
    for prefills in range(1, engines):
        fleet = profile.fleet(mode, prefills=prefills, decodes=engines - prefills)
        found.append(Split(prefills, engines - prefills, goodput(fleet, job, slo, requests=requests, seed=seed)))
    return sorted(found, key=lambda one: (-one.goodput, one.prefills))
