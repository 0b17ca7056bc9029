"""Of ways of one sort, colocated or split, that are equal at the load, the one with the most goodput is taken. Pure,
seeded.

At a load below their goodput equal ways differ in how much more they would hold. Every shape among them has a rough
goodput, from short runs; the best few have the one that the plan prints. Goodputs that differ by less than a bisection
can tell are equal too: of those the one with the most room is taken, as before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.goodputs import PRECISION, Goodput, goodput, roughly
from pdserve.planner.planning.screening import Screened, equal, more, preferred
from pdserve.planner.planning.trial import Judged

FEW = 3
"""Ways of a sort whose goodput is found."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """What came out."""

    screened: Screened
    """With the best of equal ones in their places."""
    goodputs: Mapping[Candidate, Goodput]
    """Of the best few ways of each sort, the most first."""


def rank(screened: Screened, requests: int | None) -> Ranked:
    """See the module; of an open loop. `requests`: of every run; None: by the rule of `length`."""
    found: dict[Candidate, Goodput] = {}
    places = []
    for front in (screened.best, screened.opponent):
        if front is None:
            continue
        ways = [one for one in screened.all if one.candidate.colocated is front.candidate.colocated]
        alike = [front, *(one for one in _equal(screened, ways) if one is not front)]
        few = _few(screened, alike, ways, requests)
        goodputs = {one.candidate: goodput(screened.question, one.candidate, screened.seed, requests) for one in few}
        found |= goodputs
        places.append(_chosen(screened, front, [one for one in few if one in alike], goodputs))
    ordered = sorted(found.items(), key=lambda item: -item[1].order)
    return Ranked(screened.with_best_of(places), dict(ordered))


def _equal(screened: Screened, ways: Sequence[Judged]) -> list[Judged]:
    return equal(screened.question, ways, min(one.requests for one in ways))


def _few(screened: Screened, alike: Sequence[Judged], ways: Sequence[Judged], requests: int | None) -> list[Judged]:
    """Of the equal ones both modes of the shape with the most goodput, roughly, and the next; then who is next at the
    load."""
    shapes: dict[str, Judged] = {}
    for one in alike:
        known = shapes.get(one.candidate.shape)
        if known is None or preferred(one) > preferred(known):
            shapes[one.candidate.shape] = one
    leaders = list(shapes.values())
    if len(leaders) > 1:
        rough = {one.candidate: roughly(screened.question, one.candidate, screened.seed, requests) for one in leaders}
        leaders.sort(key=lambda one: -rough[one.candidate])
    first = leaders[0].candidate.shape
    ordered = [*(one for one in alike if one.candidate.shape == first), *leaders[1:], *alike, *ways]
    return list({one.candidate: one for one in ordered}.values())[:FEW]


def _chosen(screened: Screened, front: Judged, few: Sequence[Judged], goodputs: Mapping[Candidate, Goodput]) -> Judged:
    """With as many runs as the front one has, of which it has to be equal to it still."""
    top = max((goodputs[one.candidate].order for one in few), default=0.0)

    def key(one: Judged) -> tuple[float, ...]:
        order = goodputs[one.candidate].order
        # What a bisection cannot tell apart from the most is as much.
        return (math.inf if order >= top / (1 + PRECISION) else order, *preferred(one))

    for one in sorted(few, key=key, reverse=True):
        if one.candidate == front.candidate:
            return front
        longer = more(screened.question, one, screened.count, screened.seed, len(front.trials))
        if longer in equal(screened.question, [front, longer], screened.count):
            return longer
    return front
