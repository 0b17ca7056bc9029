"""Goodput of a candidate, a figure for each seed. Pure, seeded."""

import math
from dataclasses import dataclass, replace

from pdserve.bench.goodput import THRESHOLD
from pdserve.bench.report.words import number
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.interval import Interval, predict
from pdserve.planner.planning.length import short, sustained
from pdserve.planner.planning.trial import Question, Trial, of_fleet
from pdserve.planner.search import highest
from pdserve.planner.simulator import Fleet

SEEDS = 3
PRECISION = 0.04
"""Of the bisection, relative."""
_LEAST, _MOST = 1 / 256, 128.0
"""Times the given rate: it is looked for between these."""
_STEP = 1.15
"""Factor by which a rate is moved where about the right one is known."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What was found."""

    value: Interval | None
    """Requests a second, with the interval of one more seed; None: it was not found."""
    why: str = ""
    """Why not, in words."""
    order: float = 0.0
    """To compare by: the mean; infinite where it is too high to be found, 0 where there is none."""
    held: float = 0.0
    """Requests a second at which it holds, as far as was looked; 0 where there is none."""


def goodput(question: Question, candidate: Candidate, seed: int, requests: int | None) -> Goodput:
    """The highest rate at which 90 % of the requests meet every objective; there has to be a rate.

    `requests`: of a run, short ones flatter; None: by the rule of `length`, anew for each rate. A run that gets worse
    until its end, and is as long as it may be, is judged by its last third. It is looked for from 1/256 of the given
    rate to 128 times that.
    """
    rate = question.workload.rate or 0.0
    first = _one(question, candidate, seed, requests, rate, 2.0)
    if first > _MOST * rate:
        most = _MOST * rate
        return Goodput(None, f"{THRESHOLD:.0%} and more are good at {number(most)} req/s still", math.inf, most)
    if first:
        rest = [
            _one(question, candidate, each, requests, first, 1 + 2 * PRECISION)
            for each in range(seed + 1, seed + SEEDS)
        ]
        # Each lies anywhere in the bisection's last bracket, whatever the seeds agree on.
        value = predict([first, *rest], floor=PRECISION * max(first, *rest) / math.sqrt(12))
        return Goodput(value, order=value.mean, held=value.mean)
    return Goodput(None, f"not even at {number(_LEAST * rate)} req/s are {THRESHOLD:.0%} good")


def roughly(question: Question, candidate: Candidate, seed: int, requests: int | None) -> float:
    """The same of one seed and of short runs, which flatter: enough to see who may have the most. 0: there is none."""
    rate = question.workload.rate or 0.0
    fleet = candidate.fleet(question.profile)

    def holds(tried: float) -> bool:
        at = replace(question, workload=question.workload.at(tried))
        return tried <= 2 * _MOST * rate and _briefly(at, fleet, requests, seed)

    return highest(holds, start=rate, precision=2 * PRECISION, lowest=_LEAST * rate)


def _one(question: Question, candidate: Candidate, seed: int, requests: int | None, start: float, step: float) -> float:
    """Of one seed; 0: too low to be looked for; above the most that is looked for: too high."""
    rate = question.workload.rate or 0.0
    fleet = candidate.fleet(question.profile)

    def good(trial: Trial) -> bool:
        return (trial.late if trial.growing and requests is None else trial.attainment) >= THRESHOLD

    def at(tried: float) -> Question:
        return replace(question, workload=question.workload.at(tried))

    def briefly(tried: float) -> bool:
        return tried <= 2 * _MOST * rate and _briefly(at(tried), fleet, requests, seed)

    def holds(tried: float) -> bool:
        return tried <= 2 * _MOST * rate and good(sustained(at(tried), fleet, seed, THRESHOLD))

    lowest = _LEAST * rate
    if requests is not None:
        return highest(briefly, start=start, precision=PRECISION, lowest=lowest, step=step)
    if step >= 2.0:
        # Nothing is known yet: short runs, which flatter, say from where to look.
        start = highest(briefly, start=start, precision=2 * PRECISION, lowest=lowest, step=step) or start
        step = _STEP
    return highest(holds, start=start, precision=PRECISION, lowest=lowest, step=step)


def _briefly(question: Question, fleet: Fleet, requests: int | None, seed: int) -> bool:
    """Whether a short run holds."""
    return of_fleet(question, fleet, requests or short(question, fleet), seed).attainment >= THRESHOLD
