"""What would change the answer: the nearest value of each of the workload's and the SLO's figures where another way is
better. Pure, seeded.

One figure at a time is moved away from where it is, through the range that `axes` says, until the answer's shape
(colocated, or another P:D) changes; then the place is narrowed down. Only ways near the answer are looked at: the
colocated ones, the split itself or the best one, its neighbours, and the best split of each other profile.

Short runs look for the place. They flatter, so longer ones look at both ends of what they found, and move it.

What is found never contradicts the verdict. Whoever seems better at the given figures already, where the plan's longer
runs said otherwise, has to be ahead by more than he is there. At a load up to the goodput of the best way there is a
way that holds; at one that the plan found too much there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.planner.planning.axes import Axis
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.length import FEWEST, short
from pdserve.planner.planning.screening import EQUAL, HELD, first_round, held
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What the plan says, and this may not contradict."""

    best: Candidate
    held: float = 0.0
    """Up to this rate, requests a second, half of the requests and more are good."""
    too_much: float | None = None
    """From this rate on they are not, whatever is chosen; None: not known."""


_Answer = tuple[bool, Candidate | None]
"""Whether another way is better, and which; None: not half of the requests are good."""


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
    briefly = _Evaluator(question, facts, near, brief, _attainment)
    already = requests is not None and requests <= _BRIEF
    at_length = None if already else _Evaluator(question, facts, near, long, share)
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


def near(best: Candidate, ranked: Sequence[Candidate], every: Sequence[Candidate]) -> list[Candidate]:
    """Ways that may be better where a figure differs a little. `ranked`: best first."""
    splits = [one for one in ranked if not one.colocated]
    middle = best if not best.colocated else next(iter(splits), None)
    alike = [one for one in every if middle is not None and one.kind == middle.kind]
    place = alike.index(middle) if middle in alike else 0
    others = {one.profile: one for one in reversed(splits) if middle is not None and one.profile != middle.profile}
    return [*(one for one in every if one.colocated), *alike[max(0, place - 1) : place + 2], *others.values()]


class _Evaluator:
    """Answers for changed questions by one kind of runs, by how far each way is ahead of where it is now."""

    def __init__(
        self,
        question: Question,
        facts: Facts,
        near: Sequence[Candidate],
        runs: Callable[[Question, Sequence[Candidate]], list[Judged]],
        share: Callable[[Judged], float],
    ) -> None:
        self._facts = facts
        self._near = near
        self._runs = runs
        self._share = share
        found = runs(question, near)
        self._ahead = {one.candidate: max(0.0, lead) for one, lead in self._leads(question, found)}
        self._held = min(HELD, max(map(share, found)))

    def __call__(self, axis: Axis, value: float) -> _Answer:
        question, facts = axis.at(value), self._facts
        rate = value if axis.what == "rate" else 0.0
        if facts.too_much is not None and rate >= facts.too_much:
            return True, None
        found = self._runs(question, self._near)
        if not found or (max(map(self._share, found)) < self._held and not 0.0 < rate <= facts.held):
            return True, None
        leads = ((lead - self._ahead.get(one.candidate, 0.0), one) for one, lead in self._leads(question, found))
        ahead = [(lead, one.candidate) for lead, one in leads if lead > 0]
        if not ahead:
            return False, None
        # Of equal ones the colocated is taken, as in the verdict.
        return True, max(ahead, key=lambda one: (one[1].colocated, one[0]))[1]

    def _leads(self, question: Question, found: Sequence[Judged]) -> list[tuple[Judged, float]]:
        """Every other way, and by how much, as a share of what can be had, it is beyond what it takes to be chosen."""
        best = self._facts.best
        old = next((one for one in found if one.candidate == best), None)
        top = max((one.score for one in found), default=0.0)
        can = (question.workload.rate if question.workload.rate is not None else top) or 1.0
        leads = []
        for one in found:
            if one.candidate.shape == best.shape:
                continue
            equal = max(EQUAL, 1 / one.requests)
            wanted = -equal if one.candidate.colocated and not best.colocated else equal
            # A colocated way that is as good as the answer, but not as the best of all, is not chosen. An answer that
            # does not hold the requests at all is worse than anybody.
            than = 0.0 if old is None else top if wanted < 0 else old.score
            leads.append((one, (one.score - than) / can - wanted))
        return leads


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


def _search(axis: Axis, looks: Sequence[float], briefly: _Evaluator, at_length: _Evaluator | None) -> Switch | None:
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
    axis: Axis, ends: tuple[float, float], to: Candidate | None, beyond: Sequence[float], answer: _Evaluator
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
    axis: Axis, still: float, other: float, to: Candidate | None, answer: _Evaluator
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
