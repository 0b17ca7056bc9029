"""Goodput of a candidate, a figure for each seed. Pure, seeded."""

from dataclasses import replace

from pdserve.bench.goodput import THRESHOLD
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.interval import Interval, predict
from pdserve.planner.planning.trial import Question, of_fleet, requests_for
from pdserve.planner.ratio import highest

SEEDS = 3
PRECISION = 0.04
"""Of the bisection, relative."""
_FIRST = 256
"""Times above and below the given rate that it is looked for."""


def goodput(question: Question, candidate: Candidate, seed: int, requests: int | None) -> Interval | None:
    """The highest rate at which 90 % of the requests meet every objective, with the interval of one more seed.

    `requests`: of a run; None: by the rule, anew for each rate. None comes back where no rate within a factor of 256
    around the given one is the answer.
    """
    values = [_one(question, candidate, each, requests) for each in range(seed, seed + SEEDS)]
    found = [value for value in values if value is not None]
    return predict(found) if len(found) == SEEDS and max(found) > 0 else None


def _one(question: Question, candidate: Candidate, seed: int, requests: int | None) -> float | None:
    rate = question.workload.rate
    fleet = candidate.fleet(question.profile)
    if rate is None:
        return None

    def holds(tried: float) -> bool:
        if tried > _FIRST * rate:
            return False
        at = replace(question, workload=question.workload.at(tried))
        return of_fleet(at, fleet, requests or requests_for(at, fleet), seed).attainment >= THRESHOLD

    found = highest(holds, start=rate, precision=PRECISION, lowest=rate / _FIRST)
    return None if found > _FIRST / 2 * rate else found
