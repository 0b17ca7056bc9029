"""The comparison with the base: figures and named ratios at one load, at every load, and what makes it unfair. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.report import words
from pdserve.bench.report.entries import Entry, Load, all_loads, wilson
from pdserve.bench.results import Goodput


@dataclass(frozen=True, slots=True)
class Ratios:
    """One configuration against the base; None where it cannot be said: not measured, or the base's figure is 0."""

    attainment: float | None
    """Ratio of attainments at one load."""
    attainment_range: tuple[float, float] | None
    """Where it is with 95 % confidence, were the requests independent; None: the base met none."""
    good_rate: float | None
    """Ratio of good rates at the same load."""
    goodput: float | None
    """Ratio of goodputs."""
    goodput_low: float | None
    """The least that the uncertainty of both goodputs allows."""
    goodput_high: float | None
    """The most; None: one of the two has no upper bound."""


def ratios(base: Entry, entry: Entry, load: Load) -> Ratios:
    """`entry` over `base` at a load."""
    low, value, high = goodput_ratio(base.goodput, entry.goodput)
    ours, theirs = entry.points.get(load), base.points.get(load)
    if ours is None or theirs is None:
        return Ratios(None, None, None, value, low, high)
    return Ratios(
        over(ours.attainment, theirs.attainment),
        share_ratio_range(ours.good, ours.requests, theirs.good, theirs.requests),
        over(ours.mean("good_rate"), theirs.mean("good_rate")),
        value,
        low,
        high,
    )


def share_ratio_range(good: int, of: int, base_good: int, base_of: int) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of two shares, out of the Wilson intervals of both (Donner and Zou 2012); None where
    the base met nothing. Unlike the interval by the logarithm it is not empty where both shares are 1."""
    if not base_good or not of:
        return None
    share, base = good / of, base_good / base_of
    (low, high), (base_low, base_high) = wilson(good, of), wilson(base_good, base_of)
    product = share * base

    def side(ours: float, theirs: float, sign: int) -> float:
        below = theirs * (2 * base - theirs)
        under = max(0.0, product**2 - ours * (2 * share - ours) * below)
        # Without the quadratic term the equation is linear.
        return (product + sign * math.sqrt(under)) / below if below else ours * (2 * share - ours) / (2 * product)

    return max(0.0, side(low, base_high, -1)), side(high, base_low, 1)


def goodput_ratio(base: Goodput | None, ours: Goodput | None) -> tuple[float | None, float | None, float | None]:
    """Least, stated and most; goodputs at different thresholds have no ratio."""
    if base is None or ours is None or base.threshold != ours.threshold:
        return None, None, None
    low = over(ours.low, base.high) if base.high is not None else None
    high = over(ours.high, base.low) if ours.high is not None else None
    return low, over(ours.value, base.value), high


def over(value: float, base: float) -> float | None:
    """The ratio; None where the base is 0."""
    return value / base if base > 0 else None


def ratio_columns(load: Load) -> tuple[str, str, str]:
    """The names of the three ratios, as every report prints them."""
    return (
        f"ratio of attainments at {load.symbol}",
        f"ratio of good rates at {load.symbol}",
        "ratio of goodputs",
    )


def goodput_words(entry: Entry) -> str:
    """The goodput with its uncertainty, in words."""
    found = entry.goodput
    if found is None:
        return "not searched"
    if found.value <= 0:
        return f"below {words.plain(found.high)} req/s" if found.high is not None else "0 req/s"
    if found.high is None:
        return f"at least {words.plain(found.value)} req/s"
    return f"{words.plain(found.value)} req/s ({words.plain(found.low)} to {words.plain(found.high)})"


def goodput_ratio_words(found: Ratios) -> str:
    """The ratio of goodputs with what its uncertainty allows."""
    if found.goodput is None:
        return words.NONE
    low, high = found.goodput_low, found.goodput_high
    if low is None:
        bounds = f"at most {words.ratio(high)}" if high is not None else "not bounded"
    else:
        bounds = f"{words.ratio(low)} to {words.ratio(high)}" if high is not None else f"at least {words.ratio(low)}"
    return f"{words.ratio(found.goodput)} ({bounds})"


def attainment_ratio_words(found: Ratios) -> str:
    """The ratio of attainments with its interval."""
    if found.attainment is None or found.attainment_range is None:
        return words.ratio(found.attainment)
    low, high = found.attainment_range
    return f"{words.ratio(found.attainment)} ({words.ratio(low)} to {words.ratio(high)})"


def every_load(entries: Sequence[Entry]) -> list[tuple[Load, list[Ratios]]]:
    """The ratios of every entry but the base, at every load that the base was measured at."""
    base = entries[0]
    return [
        (load, [ratios(base, entry, load) for entry in entries[1:]])
        for load in all_loads(entries)
        if load in base.points
    ]


def facts(entry: Entry) -> dict[str, str]:
    """What was measured, by name, in words; an unknown fact is left out."""
    results = entry.results
    target, machine, load = results.target, results.machine, results.workload
    said = {
        "target": f"{target.address} ({'gRPC' if target.api == 'grpc' else 'HTTP'})",
        "model": target.model,
        "hand-over": target.mode.upper() if target.mode else "none reported",
        "transport": target.transport,
        "engines": ", ".join(
            f"{sum(engine.role == role for engine in target.engines)} x {role}"
            for role in dict.fromkeys(engine.role for engine in target.engines)
        ),
        "workload": f"{load.scenario}: {_said(load.lengths)}" if load.scenario else _said(load.lengths),
        "arrivals": _said(load.arrivals),
        "requests a run": str(load.requests),
        "seed": str(load.seed),
        "SLO": slo_words(entry),
        "machine": f"{machine.cpu}, {words.count(machine.cores, 'core')}, {words.plain(machine.memory_gib)} GiB, "
        f"{machine.system}",
        "measured": results.created.replace("T", " ").replace("Z", " UTC"),
    }
    return {name: value for name, value in said.items() if value}


def slo_words(entry: Entry) -> str:
    """The objectives in words."""
    slo = entry.slo
    said = [
        f"{name} ≤ {words.objective(value)}"
        for name, value in (
            ("TTFT", slo.ttft),
            (f"ITL ({slo.itl_of} of each request)", slo.itl),
            ("TPOT", slo.tpot),
            ("E2E", slo.e2e),
        )
        if value is not None
    ]
    return " and ".join(said) or "none: a request that succeeds is good"


UNFAIR = ("model", "workload", "arrivals", "requests a run", "seed", "SLO", "machine")
"""Facts that must be equal for two results to be compared."""


def differences(entries: Sequence[Entry]) -> list[str]:
    """Which of the facts that must be equal are not."""
    told = [facts(entry) for entry in entries]
    return [name for name in UNFAIR if len({fact.get(name, "") for fact in told}) > 1]


def _said(asked: Mapping[str, Any]) -> str:
    """A mapping out of the results in words: its kind, then the rest."""
    rest = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in asked.items() if name != "kind")
    kind = str(asked.get("kind", "")).replace("_", " ")
    return f"{kind} ({rest})" if kind and rest else kind or rest


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return words.plain(value)
    if isinstance(value, (list, tuple)):
        return " to ".join(_value(each) for each in value)
    return words.NONE if value is None else str(value)
