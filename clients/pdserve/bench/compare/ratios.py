"""What the runs of a comparison say together: attainment, goodput, ratios, drift. Pure.

Repeats of a rate are pooled: attainment is the share of all their requests. A ratio of attainments is at one rate; a
ratio of goodputs is of the highest rates that held, or of the rates at which a straight line between the two
neighbouring attainments crosses the threshold. Each is named wherever it is printed. Points and ratios are those of the
report, with its intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.bounds import Bounded, divided
from pdserve.bench.compare.configurations import Key
from pdserve.bench.goodput import goodput_of
from pdserve.bench.report.entries import Point, points_of
from pdserve.bench.report.ratios import GoodputRatio, Ratios, goodput_ratio, ratios
from pdserve.bench.results import Goodput, Run, Tried


@dataclass(frozen=True, slots=True)
class Curve:
    """One configuration over the rates."""

    key: Key
    points: tuple[Point, ...]
    """By rate, ascending; each with the runs of all repeats."""
    goodput: Goodput
    crossing: Bounded
    """The goodput by interpolation."""

    def told(self) -> dict[str, Any]:
        """As compare.json has it: the figures, without the requests behind them."""
        points = [
            {
                "rate": point.load.value,
                "requests": point.requests,
                "good": point.good,
                "failed": point.failed,
                "interval": point.interval,
                "each": point.each,
                "ttfts": point.spreads("ttft", "p50"),
                "itls": point.spreads("itl", "p99"),
            }
            for point in self.points
        ]
        return {"key": self.key, "points": points, "goodput": self.goodput, "crossing": self.crossing}


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration against another."""

    over: Key
    under: Key
    attainments: tuple[tuple[float, Ratios], ...]
    """By rate."""
    goodput: GoodputRatio
    """Of the highest tried rates that held."""
    crossing: Bounded
    """Of the goodputs by interpolation."""


def curve(key: Key, repeats: Sequence[Sequence[Run]], threshold: float) -> Curve:
    """The runs of one configuration, one sequence a repeat, together.

    Runs without a rate, and partial ones, are left out: a part of a run has seen a part of its load.
    """
    runs = [run for one in repeats for run in one if run.rate is not None and not run.partial]
    points = tuple(points_of(runs).values())
    tried = [Tried(point.load.value, point.attainment, point.requests) for point in points]
    found = goodput_of(tried, threshold, "the highest of the compared rates that held, all repeats together")
    return Curve(key, points, found, crossing(tried, threshold))


def crossing(tried: Sequence[Tried], threshold: float) -> Bounded:
    """Where attainment falls to the threshold, on the line from the highest rate that held to the next one.

    Nothing is assumed outside of the tried rates: below the lowest and above the highest there is only a bound.
    """
    if not tried:
        return Bounded(None, "unknown", "no run")
    ordered = sorted(tried, key=lambda one: one.rate)
    held = [place for place, one in enumerate(ordered) if one.attainment >= threshold]
    if not held:
        return Bounded(ordered[0].rate, "at most", "the lowest rate fell short")
    last = held[-1]
    if last == len(ordered) - 1:
        return Bounded(ordered[-1].rate, "at least", "the highest rate held")
    low, high = ordered[last], ordered[last + 1]
    part = (low.attainment - threshold) / (low.attainment - high.attainment)
    return Bounded(low.rate + part * (high.rate - low.rate))


def against(over: Curve, under: Curve) -> Pair:
    """`over` against `under`, at the rates that both have."""
    theirs = {point.load: point for point in under.points}
    return Pair(
        over.key,
        under.key,
        tuple((one.load.value, ratios(theirs[one.load], one)) for one in over.points if one.load in theirs),
        goodput_ratio(under.goodput, over.goodput),
        divided(over.crossing, under.crossing),
    )
