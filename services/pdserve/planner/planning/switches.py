"""What would change the answer: the nearest value of each of the workload's and the SLO's figures where another way is
better. Pure, seeded.

One figure at a time is moved away from where it is, in growing steps, until the answer's shape (colocated, or another
P:D) changes; two more looks between the last two values narrow it down. Only ways near the answer are looked at: the
colocated one, the split itself or the best one, and its neighbours; with two short runs each.

Short runs flatter, so that a load seems to be held for too long. So the last value at which the answer stands is looked
at again with longer runs, one a way: where it does not stand there, the change is looked for before it with those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.length import FEWEST, short
from pdserve.planner.planning.screening import EQUAL, HELD, choose, first_round, held
from pdserve.planner.planning.trial import Judged, Question, judged
from pdserve.rpc.errors import ConfigError

FACTORS = (1.25, 1.6, 2.0, 3.0, 4.0)
SHARES = (0.15, 0.3, 0.5, 0.7, 0.9)
"""Steps of the hit rate, which is not moved by factors."""
_NARROWINGS = 2
_SEEDS = 2
_MOST = 120
"""Requests of a short run."""


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
class _Axis:
    what: str
    unit: str
    now: float
    at: Callable[[float], Question]
    steps: tuple[tuple[float, ...], ...]
    """Values on the way up, and on the way down."""


_Answers = Callable[[Question], tuple[bool, Candidate | None]]
"""Whether another way is better, and which."""


def switches(
    question: Question,
    best: Candidate,
    opponent: Candidate | None,
    all_: Sequence[Candidate],
    seed: int,
    requests: int | None = None,
) -> list[Switch]:
    """The nearest in each direction of each figure; none where nothing within a factor of four changes the answer.

    `requests`: of a run of the plan, where it was given: then there are no longer ones.
    """
    near = _near(best, opponent, all_)

    def briefly(changed: Question) -> tuple[bool, Candidate | None]:
        count = min(requests or short(changed, best.fleet(changed.profile)), _MOST)
        return _answer(changed, best, count, _able(changed, near, count, range(seed, seed + _SEEDS)))

    def at_length(changed: Question) -> tuple[bool, Candidate | None]:
        able = [one.candidate for one in _able(changed, near, FEWEST, (seed,))]
        if not able:
            return True, None
        count, found = first_round(changed, able, None, seed)
        if max(held(one) for one in found) < HELD:
            return True, None
        return _answer(changed, best, count, found)

    found = []
    # Where the best two are as good, a longer run may say otherwise at once: it cannot tell then.
    tells = requests is None and not at_length(question)[0]
    for axis in _axes(question):
        for steps in axis.steps:
            switch = _first(axis, steps, briefly)
            if switch is not None and tells and switch.still != axis.now:
                changed, to = at_length(axis.at(switch.still))
                switch = _narrowed(axis, axis.now, switch.still, to, at_length) if changed else switch
            if switch is not None:
                found.append(switch)
    return found


def _first(axis: _Axis, steps: Sequence[float], answer: _Answers) -> Switch | None:
    still = axis.now
    for value in steps:
        changed, to = answer(axis.at(value))
        if changed:
            return _narrowed(axis, still, value, to, answer)
        still = value
    return None


def _narrowed(axis: _Axis, still: float, other: float, to: Candidate | None, answer: _Answers) -> Switch:
    for _ in range(_NARROWINGS):
        middle = (still + other) / 2
        changed, there = answer(axis.at(middle))
        if changed:
            other, to = middle, there
        else:
            still = middle
    return Switch(axis.what, axis.unit, axis.now, still, other, to)


def _able(question: Question, near: Sequence[Candidate], count: int, seeds: Sequence[int]) -> list[Judged]:
    """Of the ways whose engines hold the requests."""
    found = []
    for candidate in near:
        try:
            found.append(judged(question, candidate, count, seeds))
        except ConfigError:
            continue  # requests that do not fit into its engines: it is no way there
    return found


def _answer(question: Question, best: Candidate, count: int, found: Sequence[Judged]) -> tuple[bool, Candidate | None]:
    """Whether another way is better, and which. None: not half of the requests are good."""
    if not found or max(one.attainment for one in found) < HELD:
        return True, None
    chosen = choose(question, found, count)
    old = next((one for one in found if one.candidate == best), None)
    can = question.workload.rate if question.workload.rate is not None else chosen.score
    better = old is None or chosen.candidate.colocated or chosen.score > old.score + EQUAL * can
    return chosen.candidate.shape != best.shape and better, chosen.candidate


def _near(best: Candidate, opponent: Candidate | None, all_: Sequence[Candidate]) -> list[Candidate]:
    split = best if not best.colocated else opponent
    alike = [one for one in all_ if split is not None and one.mode is split.mode]
    place = alike.index(split) if split in alike else 0
    return [one for one in all_ if one.colocated] + alike[max(0, place - 1) : place + 2]


def _axes(question: Question) -> Iterator[_Axis]:
    workload, slo = question.workload, question.slo
    if workload.rate is not None:
        yield _factors("rate", "req/s", workload.rate, lambda v: replace(question, workload=workload.at(v)))
    else:
        now = float(workload.concurrency or 1)

        def in_flight(value: float) -> Question:
            return replace(question, workload=replace(workload, concurrency=max(1, round(value))))

        yield _factors("requests in flight", "", now, in_flight)
    output = float(workload.typical.output)
    yield _factors(
        "answer length", "tokens", output, lambda v: replace(question, workload=workload.with_output(v / output))
    )
    if workload.trace is None:
        now = workload.hit_rate
        up = tuple(now + step for step in SHARES if now + step <= 0.95)
        down = tuple(now - step for step in SHARES if now - step > 0) + ((0.0,) if now > 0 else ())
        yield _Axis(
            "hit rate", "", now, lambda v: replace(question, workload=replace(workload, hit_rate=v)), (up, down)
        )
    for name in ("ttft", "itl", "tpot", "e2e"):
        value = getattr(slo, name)
        if value is not None:
            yield _factors(f"{name.upper()} SLO", "s", value, _slo(question, name))


def _slo(question: Question, name: str) -> Callable[[float], Question]:
    def at(value: float) -> Question:
        changed: dict[str, Any] = {name: value}
        return replace(question, slo=replace(question.slo, **changed))

    return at


def _factors(what: str, unit: str, now: float, at: Callable[[float], Question]) -> _Axis:
    ways = tuple(now * factor for factor in FACTORS), tuple(now / factor for factor in FACTORS)
    return _Axis(what, unit, now, at, ways)
