"""How many requests a run has, so that it tells what a load that lasts comes to. Pure, seeded.

A run begins with empty engines. Until the first answers end nobody leaves: batches are smaller than they will be, and a
queue needs time to reach the SLO on TTFT. A run that ends before says more requests are good than ever will be. So a
run lasts SPANS answers *as long as they take under this load*, and WAITS times the TTFT SLO: a fleet that is 4 % too
slow then makes its last requests wait for longer than that. What an answer takes under load is not known before: it is
taken from a short run, then from the longer one. A run in which things still get worse at its end is lengthened too.

Near the most that a fleet holds, it takes longer than that until arrivals come so densely that it falls behind. What is
said of a way, and its goodput, is therefore taken from runs of LASTS answers, LONG requests at least.
"""

import math

from pdserve.bench.slo import Slo
from pdserve.planner.planning.trial import Question, Trial, lone, of_fleet
from pdserve.planner.simulator import Fleet

SPANS = 3
"""Answers that a run lasts: it fills up, and stands full for twice as long."""
WAITS = 25
"""TTFT SLOs that a run lasts."""
LASTS, LONG = 10, 1000
"""Answers, and requests at least, of a run that a figure of the plan is taken from."""
FEWEST, SHORT, MOST = 100, 800, 4000
"""Requests of a run: at least; at most of a first one; at most."""
NEARLY = 1.25
"""A run that should be longer by less than this is long enough."""


def short(question: Question, fleet: Fleet) -> int:
    """Requests of a first run: by what an answer takes without any load; of a closed loop of every run, twice as many
    as are in flight at least."""
    workload = question.workload
    if workload.concurrency is not None:
        return max(2 * workload.concurrency, FEWEST)
    return _by_time(question.slo, SPANS * lone(question, fleet).e2e, workload.rate or 0.0, SHORT)


def needed(question: Question, trial: Trial) -> int:
    """Requests that a run should have had, by what it showed; of a closed loop as many as it had."""
    rate = question.workload.rate
    if rate is None:
        return trial.requests
    wanted = _by_time(question.slo, SPANS * trial.e2e, rate, MOST)
    if trial.growing:
        wanted = min(MOST, max(wanted, 2 * trial.requests))
    return trial.requests if wanted <= NEARLY * trial.requests else wanted


def lasting(question: Question, trial: Trial) -> int:
    """Requests of a run that a figure of the plan is taken from, by what a shorter one showed."""
    rate = question.workload.rate
    if rate is None:
        return trial.requests
    return max(trial.requests, LONG, _by_time(question.slo, LASTS * trial.e2e, rate, MOST))


def sustained(question: Question, fleet: Fleet, seed: int, least: float = 0.0) -> Trial:
    """A run of `lasting` length.

    `least`: a run that is surely below this attainment is not made longer, since short runs flatter.
    """
    trial = of_fleet(question, fleet, short(question, fleet), seed)
    while trial.attainment >= least - 2 * math.sqrt(least * (1 - least) / trial.requests):
        count = needed(question, trial)
        if count == trial.requests:
            count = lasting(question, trial)
        if count <= NEARLY * trial.requests:
            break
        trial = of_fleet(question, fleet, count, seed)
    return trial


def _by_time(slo: Slo, answers: float, rate: float, most: int) -> int:
    """`answers`: seconds of all that it is to last."""
    seconds = max(answers, WAITS * (slo.ttft or 0.0))
    return int(min(max(math.ceil(seconds * rate), FEWEST), most))
