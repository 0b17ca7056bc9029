"""One configuration over another: ratios at one load and of goodputs, with their uncertainty, and their names. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.bounds import Bounded, divided, of_goodput
from pdserve.bench.goodput import wilson
from pdserve.bench.report import words
from pdserve.bench.report.entries import Entry, Level, Point, all_levels
from pdserve.bench.results import Goodput


@dataclass(frozen=True, slots=True)
class Ratios:
    """At one load; None where it cannot be said: not measured, or the base's figure is 0."""

    attainment: float | None = None
    """Ratio of attainments."""
    attainment_range: tuple[float, float | None] | None = None
    """Where it is with 95 % confidence, were the requests independent. No upper end: the base met none. None: neither
    met one, or it was not measured."""
    good_rate: float | None = None
    """Ratio of good rates."""


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """Of the highest tried rates that held."""

    known: Bounded
    """The ratio, or what is known of it."""
    low: float | None = None
    """The least that the uncertainty of both goodputs allows; None: anything."""
    high: float | None = None
    """The most; None: anything."""


def ratios(base: Point | None, ours: Point | None) -> Ratios:
    """`ours` over `base`, both at the same load."""
    if ours is None or base is None:
        return Ratios()
    return Ratios(
        over(ours.attainment, base.attainment),
        share_ratio_range(ours.good, ours.requests, base.good, base.requests),
        over(ours.good_rate, base.good_rate),
    )


def share_ratio_range(good: int, of: int, base_good: int, base_of: int) -> tuple[float, float | None] | None:
    """The 95 % interval of a ratio of two shares, out of the Wilson intervals of both (Donner and Zou 2012); without an
    upper end where the base met nothing, None where neither met anything. Unlike the interval by the logarithm it is
    not empty where both shares are 1."""
    if not of or not base_of or not (good or base_good):
        return None
    share, base = good / of, base_good / base_of
    (low, high), (base_low, base_high) = wilson(share, of), wilson(base, base_of)
    product = share * base

    def side(ours: float, theirs: float, sign: int) -> float:
        below = theirs * (2 * base - theirs)
        under = max(0.0, product**2 - ours * (2 * share - ours) * below)
        # Without the quadratic term the equation is linear.
        return (product + sign * math.sqrt(under)) / below if below else ours * (2 * share - ours) / (2 * product)

    return max(0.0, side(low, base_high, -1)), side(high, base_low, 1) if base_good else None


def goodput_ratio(base: Goodput | None, ours: Goodput | None) -> GoodputRatio:
    """`ours` over `base`; goodputs at different thresholds have no ratio."""
    if base is None or ours is None:
        return GoodputRatio(Bounded(None, "unknown", "not searched"))
    if base.threshold != ours.threshold:
        return GoodputRatio(Bounded(None, "unknown", "the thresholds differ"))
    # A `low` of 0 says that nothing is known below: it bounds no ratio.
    low = ours.low / base.high if ours.low and base.high else None
    high = ours.high / base.low if ours.high and base.low else None
    return GoodputRatio(divided(of_goodput(ours), of_goodput(base)), low, high)


def over(value: float, base: float) -> float | None:
    """The ratio; None where the base is 0."""
    return value / base if base > 0 else None


def ratio_columns(load: Level) -> tuple[str, str, str]:
    """The names of the three ratios, as every report prints them."""
    return (
        f"ratio of attainments at {load.symbol}",
        f"ratio of good rates at {load.symbol}",
        "ratio of goodputs",
    )


def goodput_ratio_words(found: GoodputRatio) -> str:
    """The ratio of goodputs, or its bound, with what the uncertainty of both allows."""
    known, low, high = found.known, found.low, found.high
    if known.value is None:
        return words.NONE
    value = words.ratio(known.value)
    if known.bound == "at least":
        return f"at least {value}" + (f" ({words.ratio(low)} with the uncertainty of both)" if low is not None else "")
    if known.bound == "at most":
        return f"below {value}" + (f" ({words.ratio(high)} with the uncertainty of both)" if high is not None else "")
    if low is None:
        bounds = f"at most {words.ratio(high)}" if high is not None else "not bounded"
    else:
        bounds = f"{words.ratio(low)} to {words.ratio(high)}" if high is not None else f"at least {words.ratio(low)}"
    return f"{value} ({bounds})"


def attainment_ratio_words(found: Ratios) -> str:
    """The ratio of attainments with its interval, or its lower bound where the base met nothing."""
    if found.attainment_range is None:
        return words.ratio(found.attainment)
    low, high = found.attainment_range
    if found.attainment is None or high is None:
        return f"at least {words.ratio(low)}"
    return f"{words.ratio(found.attainment)} ({words.ratio(low)} to {words.ratio(high)})"


def every_load(entries: Sequence[Entry]) -> list[tuple[Level, list[Ratios]]]:
    """The ratios of every entry but the base, at every load that the base was measured at."""
    base = entries[0]
    return [
        (load, [ratios(base.points[load], entry.points.get(load)) for entry in entries[1:]])
        for load in all_levels(entries)
        if load in base.points
    ]
