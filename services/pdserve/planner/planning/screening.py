"""Finds the best candidate with few runs. Pure; deterministic for a seed.

The rule, in three rounds; all rounds use the same seeds for all candidates, so that they meet the same arrivals:

1. Every candidate has one short run. Those within 10 % of the best score, and the colocated one where it holds half,
   have longer ones until they are as long as `length` asks for: a short run flatters, so that whoever is behind in it
   stays behind. All of them have as many requests, and so meet the same arrivals.
2. The best, those equal to it and the colocated one have a run of the length that figures are taken from; and so on,
   while somebody with a shorter run is better. Where that is not much longer, those within 10 % of the best, three at
   least and five at most, have three runs each.
3. The best of them and its opponent (the best split where it is colocated, else the colocated one) have six.

A load at which not even half of the requests are good, whatever is chosen, is no load to choose by: the attainment of a
growing queue says how long the run was. It is lowered by a fifth at a time until somebody holds half, half of the last
third of the run included.

Candidates whose scores differ by at most 1 % of what can be had (in an open loop the rate, in a closed one the best
score), or by one request of a run, are equal. Of equal ones the colocated is taken, because it moves no KV and any of
its engines can be spared; then the one whose requests meet their objectives with the most room, and then the one with
the earlier first token. `ranking` looks at equal ones of one kind again, by their goodput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.length import lasting, needed, short
from pdserve.planner.planning.trial import Judged, Question, judged, run
from pdserve.rpc.errors import ConfigError

SEEDS = (1, 3, 6)
"""Runs of a candidate after each round."""
NEAR = 0.1
"""Of the best score: who is nearer stays."""
EQUAL = 0.01
FEWEST, MOST = 3, 5
HELD = 0.5
"""Attainment of the best that a load has to have to choose by it."""
LOWER = 0.8
"""What a load that is too much is lowered by, a factor."""
_LOWERINGS = 40
_AT_LENGTH = 1500
"""Requests of a run above which one tells as much as three shorter ones."""


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
    """Requests of a run of the best and its opponent; others may have only a shorter one."""
    seed: int
    """The first of the seeds; the others follow it."""

    @property
    def runs(self) -> int:
        """How many runs are behind it."""
        return sum(len(one.trials) for one in self.all)

    def with_best_of(self, found: Sequence[Judged]) -> "Screened":
        """With these in place of the best and its opponent: of each sort, colocated or split, the one that is given.
        Who was there is among the others."""
        known = {one.candidate: one for one in (*self.all, *found)}
        places = {one.candidate.colocated: one for one in found}
        best = places.get(self.best.candidate.colocated, self.best)
        opponent = None if self.opponent is None else places.get(self.opponent.candidate.colocated, self.opponent)
        taken = (best.candidate, None if opponent is None else opponent.candidate)
        others = tuple(sorted((one for way, one in known.items() if way not in taken), key=_order))
        return replace(self, best=best, opponent=opponent, others=others)

    @property
    def all(self) -> tuple[Judged, ...]:
        """The best, and after it the others by their score."""
        opponent = () if self.opponent is None else (self.opponent,)
        return (self.best, *sorted((*opponent, *self.others), key=_order))


def screen(question: Question, candidates: Sequence[Candidate], requests: int | None, seed: int) -> Screened:
    """See the module. `requests`: of every run; None: by the rule of `length`."""
    _, second, third = SEEDS
    question, count, found = _bearable(question, candidates, requests, seed)
    kept = _near(question, found)
    if count > _AT_LENGTH:
        second = 1
        kept = [one for one in kept if one.requests == count]
    again = [more(question, one, count, seed, second) for one in kept]
    by_candidate = {one.candidate: one for one in (*found, *again)}
    best = choose(question, again, count)
    of_best = more(question, best, count, seed, third)
    rivals = [one for one in again if one.candidate.colocated != best.candidate.colocated]
    if not rivals:
        rivals = [one for one in found if one.candidate.colocated != best.candidate.colocated]
    opponent = more(question, choose(question, rivals, count), count, seed, third) if rivals else None
    if opponent is not None and choose(question, [of_best, opponent], count) is opponent:
        of_best, opponent = opponent, of_best  # twice as many runs say otherwise
    taken = {of_best.candidate, *(() if opponent is None else (opponent.candidate,))}
    others = [one for candidate, one in by_candidate.items() if candidate not in taken]
    return Screened(
        question=question,
        best=of_best,
        opponent=opponent,
        others=tuple(sorted(others, key=_order)),
        count=count,
        seed=seed,
    )


def _bearable(
    question: Question, candidates: Sequence[Candidate], requests: int | None, seed: int
) -> tuple[Question, int, list[Judged]]:
    """The load to choose by, the requests of a run there, and everybody's first run.

    Raises:
        ConfigError: not half of the requests are good at any load: it is the SLO that most of them cannot meet.
    """
    for _ in range(_LOWERINGS):
        count, found = first_round(question, candidates, requests, seed)
        if requests is None and max(held(one) for one in found) >= HELD:
            count, found = _at_length(question, found, seed)
        lighter = replace(question, workload=question.workload.lighter(LOWER))
        top = max(held(one) if requests is None else one.attainment for one in found)
        if top >= HELD:
            return question, count, found
        if lighter.workload == question.workload:
            break
        question = lighter
    raise ConfigError(
        f"not half of the requests can meet the SLO, however low the load: {top:.0%} of them do with the best way"
    )


def held(one: Judged) -> float:
    """What a load that lasts has at most: a queue that grows has more of it at its beginning."""
    return min(one.attainment, one.mean("late"))


def first_round(
    question: Question, candidates: Sequence[Candidate], requests: int | None, seed: int
) -> tuple[int, list[Judged]]:
    """Everybody's first run, and the requests of those that are long enough."""
    ends = (candidates[0], candidates[-1])
    count = requests or max(short(question, one.fleet(question.profile)) for one in ends)
    found = {one: judged(question, one, count, (seed,)) for one in candidates}
    while requests is None and max(held(one) for one in found.values()) >= HELD:
        limit = (1 - NEAR) * max(one.score for one in found.values())
        near = [one for one in found.values() if one.score >= limit]
        longest = max(needed(question, one.trials[0]) for one in near)
        count = max(count, longest)
        front = near + [c for c in found.values() if c.candidate.colocated and c not in near and c.attainment >= HELD]
        behind = [one.candidate for one in front if one.requests < count]
        if not behind:
            break
        found |= {one: judged(question, one, count, (seed,)) for one in behind}
    return count, list(found.values())


def _at_length(question: Question, found: Sequence[Judged], seed: int) -> tuple[int, list[Judged]]:
    """With runs of the length that figures are taken from, for all that may be the best, and for the colocated one."""
    top = max(found, key=lambda one: one.score)
    count = lasting(question, top.trials[0])
    known = {one.candidate: one for one in found}
    while True:
        limit = max(one.score for one in known.values()) - EQUAL * (question.workload.rate or 0.0)
        ahead = [one.candidate for one in known.values() if one.score >= limit or one.candidate.colocated]
        behind = [one for one in ahead if known[one].requests < count]
        if not behind:
            return count, list(known.values())
        known |= {one: judged(question, one, count, (seed,)) for one in behind}


def choose(question: Question, found: Sequence[Judged], count: int) -> Judged:
    """The best, by the module's rule for equal ones. At least one. `count`: requests of a run."""
    return max(equal(question, found, count), key=lambda one: (one.candidate.colocated, *preferred(one)))


def preferred(one: Judged) -> tuple[float, float]:
    """By what of equal ones is chosen: more room, then the earlier first token."""
    return round(one.slack, 1), -one.mean("ttft")


def _order(one: Judged) -> tuple[float, float]:
    """Best first."""
    return -one.score, -one.slack


def equal(question: Question, found: Sequence[Judged], count: int) -> list[Judged]:
    """Those that are as good as the best of them. `count`: requests of a run."""
    top = max(one.score for one in found)
    can = question.workload.rate if question.workload.rate is not None else top
    return [one for one in found if one.score >= top - max(EQUAL, 1 / count) * can]


def _near(question: Question, found: Sequence[Judged]) -> list[Judged]:
    ranked = sorted(found, key=_order)
    limit = (1 - NEAR) * ranked[0].score
    kept = [one for place, one in enumerate(ranked) if place < FEWEST or (one.score >= limit and place < MOST)]
    return kept + [one for one in ranked if one.candidate.colocated and one not in kept]


def more(question: Question, one: Judged, count: int, seed: int, seeds: int) -> Judged:
    """With runs of `count` requests added up to so many; shorter ones are made anew."""
    trials = one.trials if one.requests == count else ()
    extra = [run(question, one.candidate, count, seed + place) for place in range(len(trials), seeds)]
    return Judged(one.candidate, (*trials, *extra))
