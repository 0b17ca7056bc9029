"""A comparison as text: attainment, goodput, ratios, drift, CPU shares. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pdserve.bench.compare.configurations import CONFIGURATIONS, Configuration, Key
from pdserve.bench.compare.folder import Cell, Share
from pdserve.bench.compare.ratios import Curve, Figure, Point, Ratios
from pdserve.bench.compare.settings import Settings
from pdserve.bench.results import Machine
from pdserve.bench.words import seconds


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def one(line: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([one(lines[0]), one(["-" * width for width in widths]), *(one(line) for line in lines[1:])])


def report(settings: Settings, curves: Sequence[Curve], ratios: Sequence[Ratios], cells: Sequence[Cell]) -> str:
    """All tables, each with a line that says what its figures are."""
    rates = sorted({point.rate for curve in curves for point in curve.points})
    sections = [
        (
            "Attainment: requests that met both SLOs, of all (good rate = attainment x rate, requests a second)",
            _by_rate(curves, rates, _attainment),
        ),
        (
            "Drift between repeats: attainment, lowest to highest",
            _by_rate(curves, rates, lambda point: _range(point.each, lambda share: f"{share:.0%}")),
        ),
        (
            "Median TTFT, lowest to highest of the repeats",
            _by_rate(curves, rates, lambda point: _range(point.ttfts, seconds)),
        ),
        (
            "P99 of all gaps between tokens, lowest to highest of the repeats",
            _by_rate(curves, rates, lambda point: _range(point.itls, seconds)),
        ),
        (
            f"Goodput at {settings.threshold:.0%} attainment, requests a second",
            _goodputs(curves),
        ),
    ]
    if ratios:
        sections.append(("Ratios of attainments at each rate, and of goodputs", ratio_table(ratios, rates)))
        sections += [("Where a ratio is a bound or unknown (?)", why)] if (why := _why(ratios)) else []
    if cells:
        sections.append(("Cores used, means over the time of all runs", shares_table(cells)))
    return "\n\n".join(f"{heading}\n\n{body}" for heading, body in sections)


def figure(value: Figure, unit: str = "") -> str:
    """A value or its bound; a question mark where it is unknown."""
    if value.value is None:
        return "?"
    sign = {"at least": ">= ", "at most": "< "}.get(value.bound, "")
    return f"{sign}{value.value:.2f}{unit}"


def ratio_table(ratios: Sequence[Ratios], rates: Sequence[float]) -> str:
    """One line a pair of configurations."""
    header = ["", *(f"attainment at {rate:g}/s" for rate in rates), "goodput, tried", "goodput, interpolated"]
    rows = []
    for one in ratios:
        by_rate = dict(one.attainments)
        cells = [figure(by_rate[rate], "x") if rate in by_rate else "-" for rate in rates]
        rows.append(
            [f"{_name(one.over)} / {_name(one.under)}", *cells, figure(one.goodput, "x"), figure(one.crossing, "x")]
        )
    return table(header, rows)


def shares_table(cells: Sequence[Cell]) -> str:
    """Cores by configuration and kind of process; means over the time of all runs."""
    kinds = ("proxy", "kvd", "prefill", "decode", "both", "client", "up", "others")
    rows = []
    for key in CONFIGURATIONS:
        shares = [share for cell in cells if cell.configuration == key for share in cell.cpu]
        if not shares:
            continue
        used = mean_cores(shares)
        rows.append(
            [_name(key), *(f"{used[kind]:.2f}" if kind in used else "-" for kind in kinds), f"{sum(used.values()):.2f}"]
        )
    return table(["", *kinds, "all"], rows)


def mean_cores(shares: Sequence[Share]) -> dict[str, float]:
    """Cores by kind of process, over the time of all runs; engines of one role are added up."""
    wall = sum(share.wall for share in shares)
    used: dict[str, float] = {}
    for share in shares:
        for name, cores in share.cores.items():
            kind = name.rstrip("0123456789").rstrip("-")
            used[kind] = used.get(kind, 0.0) + cores * share.wall / wall
    return used


def run_line(point: Point) -> str:
    """One rate of one deployment, when it has ended."""
    return f"{point.rate:g} req/s: {_attainment(point)}"


def head(
    settings: Settings, configurations: Sequence[Configuration], repeats: int, machine: Machine, expected: float
) -> str:
    """What is going to be measured, on what, and how long it will take (`expected`, seconds)."""
    loads = ", ".join(
        f"{count} at {rate:g} req/s" for rate, count in zip(settings.rates, settings.requests, strict=True)
    )
    what = settings.model if settings.engine == "vllm" else "the published step costs"
    lines = [
        f"{settings.engine} ({what}), {settings.input_len} tokens in, {settings.output_len} out, lengths forced",
        f"on {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}",
        f"requests: {loads}; arrivals as `vllm bench serve` makes them, seed {settings.seed} + repeat",
        *(f"  {one.label}" for one in configurations),
        "one deployment at a time on all cores; one deployment is offered all rates; "
        f"{repeats} repeats, each begins one configuration further on",
        f"about {expected / 60:.0f} minutes",
    ]
    if settings.scale != 1:
        lines.insert(
            3,
            f"costs x {settings.scale:g}: 1 s here stands for {1 / settings.scale:g} s, "
            f"1 req/s for {settings.scale:g} req/s; SLOs are measured here, so they scale too",
        )
    return "\n".join(lines)


def _by_rate(curves: Sequence[Curve], rates: Sequence[float], cell: Callable[[Point], str]) -> str:
    rows = []
    for curve in curves:
        found: Mapping[float, Point] = {point.rate: point for point in curve.points}
        rows.append([CONFIGURATIONS[curve.key].label, *(cell(found[rate]) if rate in found else "-" for rate in rates)])
    return table(["", *(f"{rate:g} req/s" for rate in rates)], rows)


def _attainment(point: Point) -> str:
    failed = f", {point.failed} failed" if point.failed else ""
    return f"{point.attainment:.0%} ({point.good} of {point.requests}{failed}; {point.good_rate:.2f}/s)"


def _range(values: Sequence[float], said: Callable[[float], str]) -> str:
    if not values:
        return "-"
    low, high = said(min(values)), said(max(values))
    return low if low == high else f"{low} .. {high}"


def _goodputs(curves: Sequence[Curve]) -> str:
    rows = []
    for curve in curves:
        found = curve.goodput
        lowest = f"< {curve.points[0].rate:g}" if curve.points else "-"
        tried = f"{found.value:g}" if found.value else lowest
        rows.append([CONFIGURATIONS[curve.key].label, tried, figure(curve.crossing)])
    return table(["", "highest tried", "interpolated"], rows)


def _why(ratios: Sequence[Ratios]) -> str:
    """What stands behind bounds and question marks."""
    lines = []
    for one in ratios:
        named = [(f" at {rate:g} req/s", value) for rate, value in one.attainments]
        named += [(", goodput, tried", one.goodput), (", goodput, interpolated", one.crossing)]
        lines += [f"{_name(one.over)} / {_name(one.under)}{name}: {value.why}" for name, value in named if value.why]
    return "\n".join(lines)


def _name(key: Key) -> str:
    """Short, for ratios."""
    one = CONFIGURATIONS[key]
    return one.mode.upper() if one.mode else f"({key})"
