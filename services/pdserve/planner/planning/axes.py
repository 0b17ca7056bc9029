"""The figures of a workload and its SLO that can be moved one at a time, and how far: the range that is searched. Pure.

Each goes as far as it means something: down to a load of requests that never meet, a prompt that no cache has, an
answer of one token, an SLO that a request needs when it is alone; up to a fully cached prompt, the longest answer that
fits, and to MOST times what was given (a rate: until nothing holds). A search ends earlier where something changes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdserve.planner.planning.floors import Floor
from pdserve.planner.planning.trial import Question

MOST = 64.0
"""Times the given figure: what has no end of its own is searched up to that."""
_HIGHEST = 4096.0
"""The same of a rate: far enough to find the one at which nothing holds."""
_LONGEST = 16.0
"""The same of answers, which take long to simulate."""
_IN_FLIGHT = 2000
"""Most requests in flight that are looked at, for the same reason."""
_ALONE = 0.05
"""Share of an answer's time, alone, between two requests' arrivals that leaves nearly all of them alone."""
_FACTOR, _STEP = 2.0, 0.2
"""How far the first looks are apart: a factor; of the hit rate a difference."""
FINE = 1.08
"""Factor within which a value is found."""
_FINE_SHARE = 0.02
"""The same of the hit rate, a difference."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One figure."""

    what: str
    unit: str
    now: float
    low: float
    """Searched from here; `now` where it cannot be less."""
    high: float
    """Searched to here."""
    at: Callable[[float], Question]
    share: bool = False
    """A share from 0 to 1, which is moved by differences and not by factors."""
    whole: bool = False
    """Of whole numbers alone."""

    def looks(self, *, up: bool) -> Iterator[float]:
        """Values away from `now`, nearest first, the end of the range last; nothing where there is no way to go."""
        end, value = (self.high, self.now) if up else (self.low, self.now)
        while value < end if up else value > end:
            if self.share:
                value += _STEP if up else -_STEP
            else:
                value = value * _FACTOR if up else value / _FACTOR
            value = self._clean(min(value, end) if up else max(value, end))
            yield value

    def middle(self, one: float, other: float) -> float | None:
        """Between two values; None: they are near enough."""
        low, high = sorted((one, other))
        if high - low <= _FINE_SHARE if self.share else high <= low * FINE:
            return None
        middle = self._clean((low + high) / 2 if self.share else math.sqrt(low * high))
        return middle if low < middle < high else None

    def _clean(self, value: float) -> float:
        if self.whole:
            return float(max(1, round(value)))
        return round(value, 4) if self.share else value


def axes(question: Question, floors: Iterable[Floor]) -> Iterator[Axis]:
    """Those that the question has. `floors`: of the kinds of ways that there are."""
    alone = list(floors)
    workload, slo = question.workload, question.slo
    if workload.rate is not None:
        rate = workload.rate
        lowest = min(rate, _ALONE / max(floor.e2e for floor in alone))
        yield Axis("rate", "req/s", rate, lowest, _HIGHEST * rate, lambda v: replace(question, workload=workload.at(v)))
    else:
        now = float(workload.concurrency or 1)

        def in_flight(value: float) -> Question:
            return replace(question, workload=replace(workload, concurrency=round(value)))

        high = max(now, min(MOST * now, _IN_FLIGHT))
        yield Axis("requests in flight", "", now, 1.0, high, in_flight, whole=True)
    output = float(workload.typical.output)
    yield Axis(
        "answer length", "tokens", output, 1.0, _longest(question),
        lambda v: replace(question, workload=workload.with_output(v / output)), whole=True,
    )  # fmt: skip
    if workload.trace is None:
        yield Axis(
            "hit rate", "", workload.hit_rate, 0.0, 1.0,
            lambda v: replace(question, workload=replace(workload, hit_rate=v)), share=True,
        )  # fmt: skip
    for name, figure in (("ttft", "ttft"), ("itl", "itl"), ("tpot", "itl"), ("e2e", "e2e")):
        value = getattr(slo, name)
        if value is not None:
            least = min(value, *(getattr(floor, figure) for floor in alone))
            yield Axis(f"{name.upper()} SLO", "s", value, least or value, MOST * value, _slo(question, name))


def _longest(question: Question) -> float:
    """Mean tokens of answers that still fit: beside the longest prompt into the context and into every engine."""
    workload, profile = question.workload, question.profile
    rooms = [role.spec.kv_tokens for one in profile.family for role in one.roles.values()]
    rooms += [one.max_model_len for one in profile.family if one.max_model_len is not None]
    now = float(workload.typical.output)
    factor = max(1.0, min(_LONGEST, workload.stretch(min(rooms))))
    return float(max(now, math.floor(now * factor)))


def _slo(question: Question, name: str) -> Callable[[float], Question]:
    def at(value: float) -> Question:
        changed: dict[str, Any] = {name: value}
        return replace(question, slo=replace(question.slo, **changed))

    return at
