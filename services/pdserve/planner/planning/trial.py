"""Runs one candidate and says how good it was. Pure, seeded."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import Profile
from pdserve.planner.simulator import Fleet, Outcome, Served, simulate
from pdserve.rpc.errors import ConfigError

_SPANS = 3
"""A run lasts as long as so many answers: it fills up, and stands full for a while."""
_FEWEST, _MOST = 100, 800
"""Requests of a run."""


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


def requests_for(question: Question, fleet: Fleet) -> int:
    """Requests of a run: as many as come while three answers are made one after another, but 100 to 800; of a closed
    loop twice as many as are in flight, at least."""
    workload = question.workload
    if workload.concurrency is not None:
        return min(max(2 * workload.concurrency, _FEWEST), max(_MOST, 2 * workload.concurrency))
    return int(min(max(_SPANS * lone(question, fleet).e2e * (workload.rate or 0.0), _FEWEST), _MOST))


def run(question: Question, candidate: Candidate, count: int, seed: int) -> Trial:
    """Simulates `count` requests."""
    return of_fleet(question, candidate.fleet(question.profile), count, seed)


def of_fleet(question: Question, fleet: Fleet, count: int, seed: int) -> Trial:
    """As `run`, of any fleet."""
    drawn = question.workload.run(count, seed)
    outcome = simulate(fleet, drawn.jobs, drawn.arrivals, concurrency=drawn.concurrency)
    if outcome.unfinished:
        raise ConfigError(f"{fleet.label}: {len(outcome.unfinished)} requests could never be served")
    return judge(question, outcome)


def judge(question: Question, outcome: Outcome) -> Trial:
    """The figures of a run."""
    slo, rate = question.slo, question.workload.rate
    attainment = outcome.attainment(slo)
    served = outcome.served
    return Trial(
        attainment=attainment,
        score=attainment * rate if rate is not None else outcome.good_rate(slo),
        slack=median(_slack(one, slo) for one in served),
        tokens=outcome.total_throughput,
        output_tokens=outcome.output_throughput,
        ttft=median(one.ttft for one in served),
        itl=median(one.itl(slo.itl_of) or 0.0 for one in served),
        missed=outcome.missed(slo),
    )


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
