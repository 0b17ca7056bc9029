"""What would change the answer: the nearest value of each of the workload's and the SLO's figures where another way is
better. Pure, seeded.

One figure at a time is moved away from where it is, in growing steps, until the answer's shape (colocated, or another
P:D) changes; two more looks between the last two values narrow it down. Only ways near the answer are looked at: the
colocated one, the split itself or the best one, and its neighbours; with two runs each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.screening import EQUAL, HELD, choose
from pdserve.planner.planning.trial import Judged, Question, judged, requests_for
from pdserve.rpc.errors import ConfigError

FACTORS = (1.25, 1.6, 2.0, 3.0, 4.0)
SHARES = (0.15, 0.3, 0.5, 0.7, 0.9)
"""Steps of the hit rate, which is not moved by factors."""
_NARROWINGS = 2
_SEEDS = 2
_MOST = 120
"""Requests of a run."""


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


def switches(
    question: Question, best: Candidate, opponent: Candidate | None, all_: Sequence[Candidate], seed: int
) -> list[Switch]:
    """The nearest in each direction of each figure; none where nothing within a factor of four changes the answer."""
    near = _near(best, opponent, all_)
    found = []
    for axis in _axes(question):
        for steps in axis.steps:
            switch = _first(axis, steps, best, near, seed)
            if switch is not None:
                found.append(switch)
    return found


def _first(axis: _Axis, steps: Sequence[float], best: Candidate, near: Sequence[Candidate], seed: int) -> Switch | None:
    still = axis.now
    for value in steps:
        changed, to = _answer(axis.at(value), best, near, seed)
        if not changed:
            still = value
            continue
        other = value
        for _ in range(_NARROWINGS):
            middle = (still + other) / 2
            changed, there = _answer(axis.at(middle), best, near, seed)
            if changed:
                other, to = middle, there
            else:
                still = middle
        return Switch(axis.what, axis.unit, axis.now, still, other, to)
    return None


def _answer(question: Question, best: Candidate, near: Sequence[Candidate], seed: int) -> tuple[bool, Candidate | None]:
    """Whether another way is better there, and which. None: not half of the requests are good there."""
    fleet = best.fleet(question.profile)
    count = min(requests_for(question, fleet), _MOST)
    found: list[Judged] = []
    for candidate in near:
        try:
            found.append(judged(question, candidate, count, range(seed, seed + _SEEDS)))
        except ConfigError:
            continue  # requests that do not fit into its engines: it is no way there
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
