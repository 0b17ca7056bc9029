"""A comparison as text: attainment, goodput, ratios, drift, CPU shares. Pure."""

from collections.abc import Callable, Mapping, Sequence

from pdserve.bench.bounds import Bounded
from pdserve.bench.compare.configurations import CONFIGURATIONS, Configuration, Key
from pdserve.bench.compare.folder import Cell, Share
from pdserve.bench.compare.ratios import Curve, Pair
from pdserve.bench.compare.settings import Settings
from pdserve.bench.goodput import fewest, unproven
from pdserve.bench.report.entries import Point
from pdserve.bench.report.ratios import Ratios, attainment_ratio_words, goodput_ratio_words
from pdserve.bench.report.words import NONE, count, plain, seconds
from pdserve.bench.results import Machine
from pdserve.bench.words import table


def report(settings: Settings, curves: Sequence[Curve], pairs: Sequence[Pair], cells: Sequence[Cell]) -> str:
    """All tables, each with a line that says what its figures are."""
    rates = sorted({point.load.value for curve in curves for point in curve.points})
    repeated = any(len(point.runs) > 1 for curve in curves for point in curve.points)
    of_repeats = ", lowest to highest of the repeats" if repeated else ""
    sections = [
        (
            "Attainment: requests that met both SLOs, of all (good rate = attainment x rate, requests a second)",
            _by_rate(curves, rates, _attainment),
        ),
        *([("Drift between repeats: attainment, lowest to highest", _drift(curves, rates))] if repeated else []),
        (
            f"Median TTFT{of_repeats}",
            _by_rate(curves, rates, lambda point: _range(point.spreads("ttft", "p50"), seconds)),
        ),
        (
            f"P99 of all gaps between tokens{of_repeats}",
            _by_rate(curves, rates, lambda point: _range(point.spreads("itl", "p99"), seconds)),
        ),
        (
            f"Goodput at {settings.threshold:.0%} attainment, requests a second",
            _goodputs(curves),
        ),
    ]
    if pairs:
        interval = "with the 95 % interval, were the requests independent"
        sections.append((f"Ratios of attainments at each rate, {interval}", ratio_table(pairs, rates)))
        sections.append(("Ratios of goodputs, with what the uncertainty of both allows", goodput_table(pairs)))
        sections += [(f"Where a ratio is a bound or unknown ({NONE})", why)] if (why := _why(pairs)) else []
    if cells:
        sections.append(("Cores used, means over the time of all runs", shares_table(cells)))
    return "\n\n".join(f"{heading}\n\n{body}" for heading, body in sections)


def figure(value: Bounded) -> str:
    """A value or its bound; a dash where it is unknown."""
    if value.value is None:
        return NONE
    sign = {"at least": "at least ", "at most": "below "}.get(value.bound, "")
    return f"{sign}{value.value:.2f}"


def ratio_table(pairs: Sequence[Pair], rates: Sequence[float]) -> str:
    """Attainments: one line a pair of configurations, one column a rate."""
    rows = []
    for one in pairs:
        by_rate = dict(one.attainments)
        cells = [attainment_ratio_words(by_rate[rate]) if rate in by_rate else "-" for rate in rates]
        rows.append([_pair_name(one), *cells])
    return table(["", *(f"attainment at {plain(rate)}/s" for rate in rates)], rows)


def goodput_table(pairs: Sequence[Pair]) -> str:
    """Goodputs: one line a pair of configurations."""
    rows = [[_pair_name(one), goodput_ratio_words(one.goodput), figure(one.crossing)] for one in pairs]
    return table(["", "goodput, tried", "goodput, interpolated"], rows)


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
    return f"{point.load.at}: {_attainment(point)}"


def head(
    settings: Settings, configurations: Sequence[Configuration], repeats: int, machine: Machine, expected: float
) -> str:
    """What is going to be measured, on what, and how long it will take (`expected`, seconds)."""
    loads = ", ".join(
        f"{number} at {plain(rate)} req/s" for rate, number in zip(settings.rates, settings.requests, strict=True)
    )
    what = settings.model if settings.engine == "vllm" else "the published step costs"
    lines = [
        f"{settings.engine} ({what}), {settings.input_len} tokens in, {settings.output_len} out, lengths forced",
        f"on {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}",
        f"requests: {loads}; arrivals as `vllm bench serve` makes them, seed {settings.seed} + repeat",
        *(f"  {one.label}" for one in configurations),
        "one deployment at a time on all cores; one deployment is offered all rates; "
        + (f"{repeats} repeats, each begins one configuration further on" if repeats > 1 else "1 repeat"),
        f"about {count(max(round(expected / 60), 1), 'minute')}",
        *_too_few(settings, repeats),
    ]
    if settings.scale != 1:
        lines.insert(
            3,
            f"costs x {settings.scale:g}: 1 s here stands for {plain(1 / settings.scale)} s, "
            f"1 req/s for {settings.scale:g} req/s; SLOs are measured here, so they scale too",
        )
    return "\n".join(lines)


def _too_few(settings: Settings, repeats: int) -> list[str]:
    """Whether so many requests can prove that a rate holds the threshold, all repeats together."""
    need = fewest(settings.threshold)
    short = [
        f"{plain(rate)} req/s ({number * repeats})"
        for rate, number in zip(settings.rates, settings.requests, strict=True)
        if need is None or number * repeats < need
    ]
    if not short:
        return []
    takes = f"even all good it takes {need} requests" if need is not None else "no number of requests does"
    return [f"too few requests for a bound at {', '.join(short)}: to prove {settings.threshold:.0%}, {takes}"]


def _by_rate(curves: Sequence[Curve], rates: Sequence[float], cell: Callable[[Point], str]) -> str:
    rows = []
    for curve in curves:
        found: Mapping[float, Point] = {point.load.value: point for point in curve.points}
        rows.append([CONFIGURATIONS[curve.key].label, *(cell(found[rate]) if rate in found else "-" for rate in rates)])
    return table(["", *(f"{plain(rate)} req/s" for rate in rates)], rows)


def _drift(curves: Sequence[Curve], rates: Sequence[float]) -> str:
    return _by_rate(curves, rates, lambda point: _range(point.each, lambda share: f"{share:.0%}"))


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
        lowest = f"below {plain(curve.points[0].load.value)}" if curve.points else "-"
        tried = plain(found.value) if found.value else lowest
        row = [
            CONFIGURATIONS[curve.key].label,
            tried,
            plain(found.low or None),
            plain(found.high),
            figure(curve.crossing),
        ]
        rows.append(row)
    said = table(["", "highest tried", "surely at least", "surely below", "interpolated"], rows)
    why = [f"{CONFIGURATIONS[one.key].label}: {told}" for one in curves if (told := unproven(one.goodput))]
    return "\n".join([said, *why])


def _why(pairs: Sequence[Pair]) -> str:
    """What stands behind bounds and dashes."""
    lines = []
    for one in pairs:
        named = [(f" at {plain(rate)} req/s", _no_ratio(found)) for rate, found in one.attainments]
        named += [(", goodput, tried", one.goodput.known.why), (", goodput, interpolated", one.crossing.why)]
        lines += [f"{_pair_name(one)}{name}: {why}" for name, why in named if why]
    return "\n".join(lines)


def _no_ratio(found: Ratios) -> str:
    if found.attainment_range is None:
        return "no request of either was good"
    return "no request below was good: the interval's lower end" if found.attainment is None else ""


def _pair_name(one: Pair) -> str:
    return f"{_name(one.over)} / {_name(one.under)}"


def _name(key: Key) -> str:
    """Short, for ratios."""
    one = CONFIGURATIONS[key]
    return one.mode.upper() if one.mode else f"({key})"
