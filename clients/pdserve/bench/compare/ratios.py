"""What the runs of a comparison say together: attainment, goodput, ratios, drift. Pure.

Repeats of a rate are pooled: attainment is the share of all their requests. A ratio of attainments is at one rate; a
ratio of goodputs is of the highest rates that held, or of the rates at which a straight line between the two
neighbouring attainments crosses the threshold. Each is named wherever it is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.bench.compare.configurations import Key
from pdserve.bench.goodput import good_rate, goodput_of
from pdserve.bench.results import Goodput, Run, Tried

Bound = Literal["", "at least", "at most", "unknown"]


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration at one rate, all repeats."""

    rate: float
    requests: int
    good: int
    """Requests that met every objective."""
    failed: int
    each: tuple[float, ...]
    """Attainment of each repeat, in order."""
    ttfts: tuple[float, ...]
    """Median TTFT of each repeat that has one, seconds."""
    itls: tuple[float, ...]
    """99th percentile of all gaps, of each repeat that has one, seconds."""

    @property
    def attainment(self) -> float:
        """Of all requests of all repeats."""
        return self.good / self.requests if self.requests else 0.0

    @property
    def good_rate(self) -> float:
        """Attainment x rate."""
        return good_rate(self.attainment, self.rate)


@dataclass(frozen=True, slots=True)
class Curve:
    """One configuration over the rates."""

    key: Key
    points: tuple[Point, ...]
    """By rate, ascending."""
    goodput: Goodput
    crossing: "Figure"
    """The goodput by interpolation."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value, or all that is known of it."""

    value: float | None
    bound: Bound = ""
    """`at least`, `at most`: the value is only a bound; `unknown`: it is None, for `why`."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ratios:
    """One configuration against another."""

    over: Key
    under: Key
    attainments: tuple[tuple[float, Figure], ...]
    """By rate."""
    goodput: Figure
    """Of the highest tried rates that held."""
    crossing: Figure
    """Of the goodputs by interpolation."""


def curve(key: Key, repeats: Sequence[Sequence[Run]], threshold: float) -> Curve:
    """The runs of one configuration, one sequence a repeat, together.

    Runs without a rate, and partial ones, are left out: a part of a run has seen a part of its load.
    """
    by_rate: dict[float, list[Run]] = {}
    for runs in repeats:
        for run in runs:
            if run.rate is not None and not run.partial:
                by_rate.setdefault(run.rate, []).append(run)
    points = tuple(_point(rate, runs) for rate, runs in sorted(by_rate.items()))
    tried = [Tried(point.rate, point.attainment) for point in points]
    count = min((point.requests for point in points), default=0)
    found = goodput_of(tried, threshold, count, "the highest of the compared rates that held, all repeats together")
    return Curve(key, points, found, crossing(tried, threshold))


def _point(rate: float, runs: Sequence[Run]) -> Point:
    return Point(
        rate=rate,
        requests=sum(run.summary.requests for run in runs),
        good=sum(not record.missed for run in runs for record in run.requests),
        failed=sum(run.summary.failed for run in runs),
        each=tuple(run.summary.attainment for run in runs),
        ttfts=tuple(run.summary.ttft.p50 for run in runs if run.summary.ttft),
        itls=tuple(run.summary.itl.p99 for run in runs if run.summary.itl),
    )


def crossing(tried: Sequence[Tried], threshold: float) -> Figure:
    """Where attainment falls to the threshold, on the line from the highest rate that held to the next one.

    Nothing is assumed outside of the tried rates: below the lowest and above the highest there is only a bound.
    """
    if not tried:
        return Figure(None, "unknown", "no run")
    ordered = sorted(tried, key=lambda one: one.rate)
    held = [place for place, one in enumerate(ordered) if one.attainment >= threshold]
    if not held:
        return Figure(ordered[0].rate, "at most", "the lowest rate fell short")
    last = held[-1]
    if last == len(ordered) - 1:
        return Figure(ordered[-1].rate, "at least", "the highest rate held")
    low, high = ordered[last], ordered[last + 1]
    part = (low.attainment - threshold) / (low.attainment - high.attainment)
    return Figure(low.rate + part * (high.rate - low.rate))


def ratios(over: Curve, under: Curve) -> Ratios:
    """`over` against `under`, at the rates that both have."""
    theirs = {point.rate: point for point in under.points}
    attainments = tuple((p.rate, _attainments(p, theirs[p.rate])) for p in over.points if p.rate in theirs)
    return Ratios(
        over.key,
        under.key,
        attainments,
        divided(_tried(over), _tried(under)),
        divided(over.crossing, under.crossing),
    )


def _attainments(over: Point, under: Point) -> Figure:
    if under.good:
        return Figure(over.attainment / under.attainment)
    if not over.good:
        return Figure(None, "unknown", "no request of either was good")
    # One good request more would have made it this; with none the ratio is above that.
    return Figure(over.attainment * under.requests, "at least", f"0 of {under.requests} were good below")


def _tried(one: Curve) -> Figure:
    """The highest tried rate that held; the lowest rate bounds it from above where none did."""
    if not one.points:
        return Figure(None, "unknown", "no run")
    if one.goodput.value > 0:
        top = one.goodput.value == one.points[-1].rate
        return Figure(one.goodput.value, "at least" if top else "", "the highest rate held" if top else "")
    return Figure(one.points[0].rate, "at most", "the lowest rate fell short")


def divided(over: Figure, under: Figure) -> Figure:
    """A quotient of two values, each exact or a bound; None where the bounds do not tell."""
    if over.value is None or under.value is None:
        return Figure(None, "unknown", over.why or under.why)
    value = over.value / under.value
    if not over.bound and not under.bound:
        return Figure(value)
    why = "; ".join(f"{name} {figure.why}" for name, figure in (("above:", over), ("below:", under)) if figure.bound)
    rises = {"at least": 1, "at most": -1, "": 0}
    signs = {rises[over.bound], -rises[under.bound]} - {0}
    if len(signs) != 1:
        return Figure(None, "unknown", why)
    return Figure(value, "at least" if signs == {1} else "at most", why)
