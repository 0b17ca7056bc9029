"""Finds the best candidate with few runs. Pure; deterministic for a seed.

The rule, in three rounds; all rounds use the same seeds for all candidates, so that they meet the same arrivals:

1. Every candidate has one run.
2. Those within 10 % of the best score go on, three at least and five at most, and the colocated one in any case: with
   four runs each.
3. The best of them and its opponent (the best split where it is colocated, else the colocated one) have six.

A load at which not even half of the requests are good, whatever is chosen, is no load to choose by: the attainment of a
growing queue says how long the run was. It is lowered by a fifth at a time, one run each, until somebody holds half.

Candidates whose scores differ by at most 1 % of what can be had (in an open loop the rate, in a closed one the best
score), or by one request of a run, are equal. Of equal ones the colocated is taken, because it moves no KV and any of
its engines can be spared; then the one whose requests meet their objectives with the most room, and then the one with
the earlier first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.trial import Judged, Question, judged, requests_for, run

SEEDS = (1, 3, 6)
"""Runs of a candidate after each round."""
NEAR = 0.1
"""Of the best score: who is nearer stays."""
EQUAL = 0.01
FEWEST, MOST = 3, 5
HELD = 0.5
"""Attainment of the best that a load has to have to choose by it."""
_LOWER, _LOWERINGS = 0.8, 40


@dataclass(frozen=True, slots=True)
class Screened:
    """What came out."""

    question: Question
    """At the load that was chosen by: a lower one than asked for where nobody holds half of that."""
    best: Judged
    opponent: Judged | None
    """The best of the other kind; None: the profile knows only one."""
    others: tuple[Judged, ...]
    """All else, best first; some after a single run."""
    count: int
    """Requests of a run."""
    seed: int
    """The first of the seeds; the others follow it."""
    runs: int
    """How many were simulated."""

    @property
    def all(self) -> tuple[Judged, ...]:
        """Best first."""
        opponent = () if self.opponent is None else (self.opponent,)
        return tuple(sorted((self.best, *opponent, *self.others), key=lambda one: (-one.score, -one.slack)))


def screen(question: Question, candidates: Sequence[Candidate], requests: int | None, seed: int) -> Screened:
    """See the module. `requests`: of a run; None: by the rule of `trial.requests_for`."""
    first, second, third = SEEDS
    question, count, found = _bearable(question, candidates, requests, seed, first)
    kept = _near(question, found)
    again = [_more(question, one, count, seed, second) for one in kept]
    by_candidate = {one.candidate: one for one in (*found, *again)}
    best = choose(question, again, count)
    of_best = _more(question, best, count, seed, third)
    rivals = [one for one in again if one.candidate.colocated != best.candidate.colocated]
    if not rivals:
        rivals = [one for one in found if one.candidate.colocated != best.candidate.colocated]
    opponent = _more(question, choose(question, rivals, count), count, seed, third) if rivals else None
    if opponent is not None and choose(question, [of_best, opponent], count) is opponent:
        of_best, opponent = opponent, of_best  # twice as many runs say otherwise
    taken = {of_best.candidate, *(() if opponent is None else (opponent.candidate,))}
    others = [one for candidate, one in by_candidate.items() if candidate not in taken]
    final = (of_best, *others, *(() if opponent is None else (opponent,)))
    return Screened(
        question=question,
        best=of_best,
        opponent=opponent,
        others=tuple(sorted(others, key=lambda one: (-one.score, -one.slack))),
        count=count,
        seed=seed,
        runs=sum(len(one.trials) for one in final),
    )


def _bearable(
    question: Question, candidates: Sequence[Candidate], requests: int | None, seed: int, seeds: int
) -> tuple[Question, int, list[Judged]]:
    """The load to choose by, the requests of a run there, and everybody's first run."""
    for _ in range(_LOWERINGS):
        ends = (candidates[0], candidates[-1])
        count = requests or max(requests_for(question, one.fleet(question.profile)) for one in ends)
        found = [judged(question, candidate, count, range(seed, seed + seeds)) for candidate in candidates]
        lighter = replace(question, workload=question.workload.lighter(_LOWER))
        if max(one.attainment for one in found) >= HELD or lighter.workload == question.workload:
            break
        question = lighter
    return question, count, found


def choose(question: Question, found: Sequence[Judged], count: int) -> Judged:
    """The best, by the module's rule for equal ones. At least one. `count`: requests of a run."""
    top = max(one.score for one in found)
    can = question.workload.rate if question.workload.rate is not None else top
    equal = [one for one in found if one.score >= top - max(EQUAL, 1 / count) * can]
    return max(equal, key=lambda one: (one.candidate.colocated, round(one.slack, 1), -one.mean("ttft")))


def _near(question: Question, found: Sequence[Judged]) -> list[Judged]:
    ranked = sorted(found, key=lambda one: (-one.score, -one.slack))
    limit = (1 - NEAR) * ranked[0].score
    kept = [one for place, one in enumerate(ranked) if place < FEWEST or (one.score >= limit and place < MOST)]
    return kept + [one for one in ranked if one.candidate.colocated and one not in kept]


def _more(question: Question, one: Judged, count: int, seed: int, seeds: int) -> Judged:
    """With runs added up to so many."""
    extra = [run(question, one.candidate, count, seed + place) for place in range(len(one.trials), seeds)]
    return Judged(one.candidate, (*one.trials, *extra))
