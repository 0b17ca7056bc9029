"""What a comparison shows: each section a heading and a table, or lines of words. Pure.

`tables` prints them on a terminal, `chapter` puts them into the report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.bounds import Bounded
from pdserve.bench.compare.configurations import CONFIGURATIONS, Key
from pdserve.bench.compare.folder import Cell, Share
from pdserve.bench.compare.ratios import Curve, Pair
from pdserve.bench.compare.settings import Settings
from pdserve.bench.goodput import unproven
from pdserve.bench.report.entries import Point
from pdserve.bench.report.ratios import Ratios, attainment_ratio_words, goodput_ratio_words
from pdserve.bench.report.words import NONE, plain, seconds


@dataclass(frozen=True, slots=True)
class Section:
    """One table with what is to be said of it."""

    heading: str
    """What its figures are."""
    columns: tuple[str, ...] = ()
    """None: there is no table."""
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()
    """Below the table, or in its place."""


def sections(
    settings: Settings, curves: Sequence[Curve], pairs: Sequence[Pair], cells: Sequence[Cell]
) -> list[Section]:
    """All of them, in order."""
    rates = sorted({point.load.value for curve in curves for point in curve.points})
    repeated = any(len(point.runs) > 1 for curve in curves for point in curve.points)
    of_repeats = ", lowest to highest of the repeats" if repeated else ""

    def by_rate(heading: str, cell: Callable[[Point], str]) -> Section:
        return Section(
            heading, ("configuration", *(f"{plain(rate)} req/s" for rate in rates)), _by_rate(curves, rates, cell)
        )

    found = [
        by_rate(
            "Attainment: requests that met both SLOs, of all (good rate = attainment x rate, requests a second)",
            attainment_words,
        )
    ]
    if repeated:
        found.append(by_rate("Drift between repeats: attainment, lowest to highest", _drift))
    found += [
        by_rate(f"Median TTFT{of_repeats}", lambda point: _range(point.spreads("ttft", "p50"), seconds)),
        by_rate(
            f"P99 of all gaps between tokens{of_repeats}",
            lambda point: _range(point.spreads("itl", "p99"), seconds),
        ),
        goodputs(settings, curves),
    ]
    if pairs:
        found += [ratios(pairs, rates), goodput_ratios(pairs)]
        if why := _why(pairs):
            found.append(Section(f"Where a ratio is a bound or unknown ({NONE})", lines=why))
    if cells:
        found.append(shares(cells))
    return found


def ratios(pairs: Sequence[Pair], rates: Sequence[float]) -> Section:
    """One row a pair of configurations, one column a rate. All were offered the same, so that good rates have the
    ratios that attainments have."""
    rows = []
    for one in pairs:
        by_rate = dict(one.attainments)
        rows.append(
            (_pair_name(one), *(attainment_ratio_words(by_rate[rate]) if rate in by_rate else "-" for rate in rates))
        )
    heading = (
        "Ratios of attainments at each rate, which are the ratios of good rates too, with the 95 % interval, were the "
        "requests independent"
    )
    return Section(heading, ("ratio", *(f"attainment at {plain(rate)}/s" for rate in rates)), tuple(rows))


def goodput_ratios(pairs: Sequence[Pair]) -> Section:
    """One row a pair of configurations."""
    return Section(
        "Ratios of goodputs, with what the uncertainty of both allows",
        ("ratio", "goodput, tried", "goodput, interpolated"),
        tuple((_pair_name(one), goodput_ratio_words(one.goodput), figure(one.crossing)) for one in pairs),
    )


def goodputs(settings: Settings, curves: Sequence[Curve]) -> Section:
    """One row a configuration."""
    rows = []
    for curve in curves:
        found = curve.goodput
        lowest = f"below {plain(curve.points[0].load.value)}" if curve.points else "-"
        tried = plain(found.value) if found.value else lowest
        rows.append((_label(curve.key), tried, plain(found.low or None), plain(found.high), figure(curve.crossing)))
    return Section(
        f"Goodput at {settings.threshold:.0%} attainment, requests a second",
        ("configuration", "highest tried", "surely at least", "surely below", "interpolated"),
        tuple(rows),
        tuple(f"{_label(one.key)}: {told}" for one in curves if (told := unproven(one.goodput))),
    )


def shares(cells: Sequence[Cell]) -> Section:
    """Cores by configuration and kind of process; means over the time of all runs."""
    kinds = ("proxy", "kvd", "prefill", "decode", "both", "client", "up", "others")
    rows = []
    for key in CONFIGURATIONS:
        of_all = [share for cell in cells if cell.configuration == key for share in cell.cpu]
        if not of_all:
            continue
        used = mean_cores(of_all)
        cores = (f"{used[kind]:.2f}" if kind in used else "-" for kind in kinds)
        rows.append((_name(key), *cores, f"{sum(used.values()):.2f}"))
    return Section("Cores used, means over the time of all runs", ("configuration", *kinds, "all"), tuple(rows))


def mean_cores(shares: Sequence[Share]) -> dict[str, float]:
    """Cores by kind of process, over the time of all runs; engines of one role are added up."""
    wall = sum(share.wall for share in shares)
    used: dict[str, float] = {}
    for share in shares:
        for name, cores in share.cores.items():
            kind = name.rstrip("0123456789").rstrip("-")
            used[kind] = used.get(kind, 0.0) + cores * share.wall / wall
    return used


def figure(value: Bounded) -> str:
    """A value or its bound; a dash where it is unknown."""
    if value.value is None:
        return NONE
    sign = {"at least": "at least ", "at most": "below "}.get(value.bound, "")
    return f"{sign}{value.value:.2f}"


def attainment_words(point: Point) -> str:
    """Share, counts and good rate."""
    failed = f", {point.failed} failed" if point.failed else ""
    return f"{point.attainment:.0%} ({point.good} of {point.requests}{failed}; {point.good_rate:.2f}/s)"


def _by_rate(
    curves: Sequence[Curve], rates: Sequence[float], cell: Callable[[Point], str]
) -> tuple[tuple[str, ...], ...]:
    rows = []
    for curve in curves:
        found: Mapping[float, Point] = {point.load.value: point for point in curve.points}
        rows.append((_label(curve.key), *(cell(found[rate]) if rate in found else "-" for rate in rates)))
    return tuple(rows)


def _drift(point: Point) -> str:
    return _range(point.each, lambda share: f"{share:.0%}")


def _range(values: Sequence[float], said: Callable[[float], str]) -> str:
    if not values:
        return "-"
    low, high = said(min(values)), said(max(values))
    return low if low == high else f"{low} .. {high}"


def _why(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """What stands behind bounds and dashes: each reason with all that it is the reason of."""
    found: dict[str, list[str]] = {}
    for one in pairs:
        named = [(f"{_pair_name(one)} at {plain(rate)} req/s", _no_ratio(ratios)) for rate, ratios in one.attainments]
        named.append((f"goodputs of {_pair_name(one)}", one.goodput.known.why))
        if one.crossing.why != one.goodput.known.why:
            named.append((f"interpolated goodputs of {_pair_name(one)}", one.crossing.why))
        for name, why in named:
            if why:
                found.setdefault(why, []).append(name)
    return tuple(f"{why}: {', '.join(names)}" for why, names in found.items())


def _no_ratio(found: Ratios) -> str:
    if found.attainment_range is None:
        return "no request of either was good"
    return "no request below was good, so that it is the interval's lower end" if found.attainment is None else ""


def _pair_name(one: Pair) -> str:
    return f"{_name(one.over)} / {_name(one.under)}"


def _name(key: Key) -> str:
    """Short, for ratios."""
    one = CONFIGURATIONS[key]
    return one.mode.upper() if one.mode else f"({key})"


def _label(key: Key) -> str:
    return CONFIGURATIONS[key].label
