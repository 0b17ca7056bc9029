"""Runs one candidate and says how good it was. Pure, seeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import Profile
from pdserve.planner.simulator import Fleet, Outcome, Served, simulate
from pdserve.rpc.errors import ConfigError

_DROP = 0.05
"""Attainment that the last third of a run has to be below the one before, at least, to be worse than it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned for."""

    profile: Profile
    workload: Workload
    slo: Slo


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run."""

    attainment: float
    """Share of its requests that met every objective."""
    score: float
    """What is compared: good requests a second. Open loop: attainment x rate. Closed: as many as there were."""
    slack: float
    """The median request's nearest objective over what it took: above 1 it was met with room. 1 / E2E without any."""
    tokens: float
    """Prompt and answer tokens a second."""
    output_tokens: float
    """Answer tokens a second."""
    ttft: float
    """Median, seconds."""
    itl: float
    """Median of the figure that the SLO is of, seconds."""
    missed: dict[str, float]
    """Share of the requests that missed each objective."""
    requests: int
    """That it had."""
    late: float
    """Attainment of the last third of them, in the order of sending."""
    e2e: float
    """Mean of that third, seconds."""
    growing: bool
    """Open loop: at its end more were in flight than a third before, or fewer good, beyond what chance explains."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and its runs, one a seed, in the order of the seeds."""

    candidate: Candidate
    trials: tuple[Trial, ...]

    @property
    def attainment(self) -> float:
        """The mean."""
        return fmean(trial.attainment for trial in self.trials)

    @property
    def score(self) -> float:
        """The mean."""
        return fmean(trial.score for trial in self.trials)

    @property
    def slack(self) -> float:
        """The mean."""
        return fmean(trial.slack for trial in self.trials)

    @property
    def requests(self) -> int:
        """Of a run."""
        return self.trials[0].requests

    @property
    def growing(self) -> bool:
        """Whether most of the runs got worse at their end."""
        return 2 * sum(trial.growing for trial in self.trials) > len(self.trials)

    def mean(self, name: str) -> float:
        """Of a figure of the trials."""
        return fmean(getattr(trial, name) for trial in self.trials)

    def missed(self, name: str) -> float:
        """Mean share of the requests that missed an objective."""
        return fmean(trial.missed.get(name, 0.0) for trial in self.trials)


def lone(question: Question, fleet: Fleet) -> Served:
    """The typical request with nothing else there: no load makes anything faster than that.

    Raises:
        ConfigError: it does not fit into an engine.
    """
    return simulate(fleet, [question.workload.typical]).served[0]


def run(question: Question, candidate: Candidate, count: int, seed: int) -> Trial:
    """Simulates `count` requests."""
    return of_fleet(question, candidate.fleet(question.profile), count, seed)


def of_fleet(question: Question, fleet: Fleet, count: int, seed: int) -> Trial:
    """As `run`, of any fleet."""
    return judge(question, outcome_of(question, fleet, count, seed))


def outcome_of(question: Question, fleet: Fleet, count: int, seed: int) -> Outcome:
    """A run itself.

    Raises:
        ConfigError: a request that can never be served.
    """
    drawn = question.workload.run(count, seed)
    outcome = simulate(fleet, drawn.jobs, drawn.arrivals, concurrency=drawn.concurrency)
    if outcome.unfinished:
        raise ConfigError(f"{fleet.label}: {len(outcome.unfinished)} requests could never be served")
    return outcome


def judge(question: Question, outcome: Outcome) -> Trial:
    """The figures of a run."""
    slo, rate = question.slo, question.workload.rate
    served = outcome.served
    good = [not one.missed(slo) for one in served]
    attainment = fmean(good)
    last = 2 * len(served) // 3
    return Trial(
        attainment=attainment,
        score=attainment * rate if rate is not None else outcome.good_rate(slo),
        slack=median(_slack(one, slo) for one in served),
        tokens=outcome.total_throughput,
        output_tokens=outcome.output_throughput,
        ttft=median(one.ttft for one in served),
        itl=median(one.itl(slo.itl_of) or 0.0 for one in served),
        missed=outcome.missed(slo),
        requests=len(served),
        late=fmean(good[last:]),
        e2e=fmean(one.e2e for one in served[last:]),
        growing=rate is not None and _growing(served, good),
    )


def _growing(served: Sequence[Served], good: Sequence[bool]) -> bool:
    """Beyond two standard deviations of independent requests."""
    first, last = len(served) // 3, 2 * len(served) // 3
    if not first:
        return False
    before, late = fmean(good[first:last]), fmean(good[last:])
    middle = (before + late) / 2
    if before - late > max(_DROP, 2 * math.sqrt(2 * middle * (1 - middle) / (len(served) - last))):
        return True
    less, more = (_in_flight(served, served[place].sent) for place in (last - 1, -1))
    return more - less > 2 * math.sqrt(less + more)


def _in_flight(served: Sequence[Served], at: float) -> int:
    return sum(one.sent <= at < one.sent + one.e2e for one in served)


def _slack(one: Served, slo: Slo) -> float:
    pairs = (
        (slo.ttft, one.ttft),
        (slo.itl, one.itl(slo.itl_of)),
        (slo.tpot, one.itl_mean if one.tokens > 1 else None),
        (slo.e2e, one.e2e),
    )
    room = [most / value for most, value in pairs if most is not None and value]
    return min(room, default=1.0 / one.e2e if one.e2e else 0.0)


def judged(question: Question, candidate: Candidate, count: int, seeds: Sequence[int]) -> Judged:
    """A candidate's runs."""
    return Judged(candidate, tuple(run(question, candidate, count, seed) for seed in seeds))
