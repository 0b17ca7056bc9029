"""What binds: everything is eased by a quarter in turn, and what helps most is it. Pure, seeded.

It is looked at where the deployment is just too small: at 1.15 x its goodput; of a closed loop at what is in flight.
Of the machine: prefill's and decode's speed, KV memory, and the hand-over with its link; and each objective.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.trial import Question, judge, outcome_of
from pdserve.planner.simulator import EngineSpec, Fleet

EASED = 1.25
BRIEF = 2000
"""Requests of a run that differences need at most."""
OVER = 1.15
"""Of the goodput: where it is looked at."""
_HELPS = 0.02
"""Attainment that a relief has to bring to count for one; of a closed loop the same share of its score."""

PREFILL, DECODE, KV, LINK = "prefill throughput", "decode throughput", "KV capacity", "the hand-over and its link"
TTFT, ITL, TPOT, E2E = "the TTFT SLO", "the ITL SLO", "the TPOT SLO", "the E2E SLO"


@dataclass(frozen=True, slots=True)
class Binding:
    """What was found."""

    rate: float | None
    """Where it was looked at, requests a second; None: at the given number in flight."""
    base: float
    """The score there."""
    gains: Mapping[str, float]
    """Relief: what it brings to the score, as a share of what can be had; most first."""

    @property
    def machine(self) -> str | None:
        """The part of the machine that binds; None: none alone."""
        return self._first((PREFILL, DECODE, KV, LINK))

    @property
    def objective(self) -> str | None:
        """The objective that binds; None: none alone."""
        return self._first((TTFT, ITL, TPOT, E2E))

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name, gain in self.gains.items() if name in names and gain >= _HELPS), None)


def binding(
    question: Question, candidate: Candidate, goodput: float | None, count: int, seed: int, seeds: int = 2
) -> Binding:
    """`count`: requests of a run, of which there are `seeds`; `goodput` None: a closed loop, or nothing holds: the
    given load is taken."""
    workload = question.workload
    if workload.rate is not None and goodput:
        question = replace(question, workload=workload.at(OVER * goodput))
    fleet = candidate.fleet(question.profile)
    slos = dict(_looser(question.slo))
    base, *loose = _scores(question, fleet, (question.slo, *slos.values()), count, seed, seeds)
    can = question.workload.rate if question.workload.rate is not None else max(base, 1e-9)
    gains = {}
    for name, eased in _reliefs(fleet, candidate).items():
        gains[name] = (_scores(question, eased, (question.slo,), count, seed, seeds)[0] - base) / can
    gains |= {name: (score - base) / can for name, score in zip(slos, loose, strict=True)}
    ordered = dict(sorted(gains.items(), key=lambda item: -item[1]))
    return Binding(question.workload.rate, base, ordered)


def _scores(question: Question, fleet: Fleet, slos: Sequence[Slo], count: int, seed: int, seeds: int) -> list[float]:
    """Of the same runs by each SLO."""
    runs = [outcome_of(question, fleet, count, seed + place) for place in range(seeds)]
    return [fmean(judge(replace(question, slo=slo), one).score for one in runs) for slo in slos]


def _looser(slo: Slo) -> Iterator[tuple[str, Slo]]:
    for name, key in ((TTFT, "ttft"), (ITL, "itl"), (TPOT, "tpot"), (E2E, "e2e")):
        most = getattr(slo, key)
        if most is not None:
            eased: dict[str, Any] = {key: most * EASED}
            yield name, replace(slo, **eased)


def _reliefs(fleet: Fleet, candidate: Candidate) -> dict[str, Fleet]:
    def every(change: Callable[[EngineSpec], EngineSpec]) -> Fleet:
        return replace(fleet, prefill=change(fleet.prefill), decode=change(fleet.decode), both=change(fleet.both))

    found = {PREFILL: every(_faster_prefill), DECODE: every(_faster_decode), KV: every(_more_memory)}
    if not candidate.colocated:
        link = fleet.handover
        found[LINK] = replace(
            fleet,
            handover=replace(
                link,
                bandwidth=link.bandwidth * EASED,
                serialization=link.serialization / EASED,
                tail=link.tail / EASED,
                tail_write=None if link.tail_write is None else link.tail_write / EASED,
            ),
        )
    return found


def _costs(spec: EngineSpec, *names: str) -> EngineSpec:
    return replace(spec, cost=replace(spec.cost, **{name: getattr(spec.cost, name) / EASED for name in names}))


def _faster_prefill(spec: EngineSpec) -> EngineSpec:
    return _costs(spec, "prefill_base", "prefill_per_token", "mixed_base", "mixed_per_token")


def _faster_decode(spec: EngineSpec) -> EngineSpec:
    return _costs(spec, "decode_base", "decode_per_seq", "decode_per_context_token")


def _more_memory(spec: EngineSpec) -> EngineSpec:
    return replace(spec, kv_tokens=math.ceil(spec.kv_tokens * EASED))
