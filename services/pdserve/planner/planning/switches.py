"""What would change the answer: the nearest value of each of the workload's and the SLO's figures where another way is
better. Pure, seeded.

One figure at a time is moved away from where it is, through the range that `axes` says, until the answer's shape
(colocated, or another P:D) changes; `rivals` says whether it does. Then the place is narrowed down.

Short runs look for the place. They flatter, so longer ones look at both ends of what they found, and move it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.planner.planning.axes import Axis
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.length import FEWEST, short
from pdserve.planner.planning.rivals import Evaluator, Facts
from pdserve.planner.planning.screening import first_round, held
from pdserve.planner.planning.trial import Judged, Question, judged
from pdserve.rpc.errors import ConfigError

_BRIEF = 300
"""Requests of a short run at most."""
_SEEDS = 3
"""Runs of a way, where the plan's own are as short as that."""
_NARROWINGS = 5
"""Looks at most that narrow a place down, and as many with longer runs."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Where another way is better."""

    what: str
    """The figure that was moved."""
    unit: str
    now: float
    still: float
    """The farthest value, in its direction, at which the answer stands."""
    other: float
    """The nearest at which it does not."""
    to: Candidate | None
    """The better way there; None: from there on not half of the requests are good, whatever is chosen."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """A figure that changes nothing in one direction or both."""

    what: str
    unit: str
    now: float
    low: float | None
    """Searched down to here, and nothing changed; None: something did, or there is no way down."""
    high: float | None
    """The same upwards."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What came out."""

    switches: tuple[Switch, ...]
    """The nearest in each direction of each figure."""
    quiet: tuple[Quiet, ...]
    """Where there is none, and how far it was looked for."""


def switches(
    question: Question, facts: Facts, near: Sequence[Candidate], axes: Sequence[Axis], seed: int, requests: int | None
) -> Searched:
    """`near`: ways that are looked at, the best among them. `requests`: of a run of the plan; None: by the rule of
    `length`."""

    def brief(changed: Question, ways: Sequence[Candidate]) -> list[Judged]:
        count = min(requests or short(changed, facts.best.fleet(changed.profile)), _BRIEF)
        return _judged(changed, ways, count, range(seed, seed + (_SEEDS if count == requests else 1)))

    def long(changed: Question, ways: Sequence[Candidate]) -> list[Judged]:
        if requests is not None:
            return _judged(changed, ways, requests, (seed,))
        able = [one.candidate for one in _judged(changed, ways, FEWEST, (seed,))]
        return first_round(changed, able, None, seed)[1] if able else []

    share = held if requests is None else _attainment
    briefly = Evaluator(question, facts, near, brief, _attainment)
    already = requests is not None and requests <= _BRIEF
    at_length = None if already else Evaluator(question, facts, near, long, share)
    found, quiet = [], []
    for axis in axes:
        ends: list[float | None] = []
        for up in (False, True):
            looks = list(axis.looks(up=up))
            switch = _search(axis, looks, briefly, at_length)
            if switch is not None:
                found.append(switch)
            ends.append(looks[-1] if looks and switch is None else None)
        if ends != [None, None]:
            quiet.append(Quiet(axis.what, axis.unit, axis.now, *ends))
    return Searched(tuple(found), tuple(quiet))


def _search(axis: Axis, looks: Sequence[float], briefly: Evaluator, at_length: Evaluator | None) -> Switch | None:
    still = axis.now
    for place, value in enumerate(looks):
        changed, to = briefly(axis, value)
        if not changed:
            still = value
            continue
        still, value, to = _narrowed(axis, still, value, to, briefly)
        if at_length is None:
            return _switch(axis, still, value, to)
        return _checked(axis, (still, value), to, looks[place:], at_length)
    # Short runs flatter: what they see nothing of may be there.
    if at_length is not None and looks and (found := at_length(axis, still))[0]:
        return _switch(axis, *_narrowed(axis, axis.now, still, found[1], at_length))
    return None


def _checked(
    axis: Axis, ends: tuple[float, float], to: Candidate | None, beyond: Sequence[float], answer: Evaluator
) -> Switch | None:
    """By longer runs: the place where they change, before, between or beyond what short ones found."""
    still, other = ends
    if still != axis.now:
        changed, there = answer(axis, still)
        if changed:
            return _switch(axis, *_narrowed(axis, axis.now, still, there, answer))
    for value in dict.fromkeys((other, *beyond)):
        changed, there = answer(axis, value)
        if changed:
            return _switch(axis, *_narrowed(axis, still, value, there, answer))
        still = value
    return None


def _narrowed(
    axis: Axis, still: float, other: float, to: Candidate | None, answer: Evaluator
) -> tuple[float, float, Candidate | None]:
    for _ in range(_NARROWINGS):
        middle = axis.middle(still, other)
        if middle is None:
            break
        changed, there = answer(axis, middle)
        if changed:
            other, to = middle, there
        else:
            still = middle
    return still, other, to


def _switch(axis: Axis, still: float, other: float, to: Candidate | None) -> Switch:
    return Switch(axis.what, axis.unit, axis.now, still, other, to)


def _attainment(one: Judged) -> float:
    return one.attainment


def _judged(question: Question, ways: Sequence[Candidate], count: int, seeds: Sequence[int]) -> list[Judged]:
    """Of the ways whose engines hold the requests."""
    found = []
    for candidate in ways:
        try:
            found.append(judged(question, candidate, count, seeds))
        except ConfigError:
            continue  # requests that do not fit into its engines: it is no way there
    return found
