"""The figure of the gaps between tokens: their percentiles, of all gaps and of each request's own figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.report import palette, words
from pdserve.bench.report.entries import Entry, Level
from pdserve.bench.report.figures import Frame, Sheet, ticks
from pdserve.bench.report.figures_curves import Series, band, curves
from pdserve.bench.report.picture import Picture, Table
from pdserve.bench.slo import itl_figure, sorted_percentile

SHARES = (0.0, 50.0, 90.0, 99.0, 99.9)
"""Percentiles with a line of their own; each is one in two, ten, a hundred, a thousand that are slower."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """What one configuration showed at one load, seconds, ascending."""

    entry: Entry
    all_gaps: tuple[float, ...]
    """Every gap of every request."""
    per_request: tuple[float, ...]
    """The figure of each request that the objective is on."""


def gaps_of(entry: Entry, load: Level) -> Gaps:
    """Of all runs at the load."""
    records = [record for run in entry.points[load].runs for record in run.requests if record.itls]
    figures = [figure for record in records if (figure := itl_figure(record.itls, entry.slo.itl_of)) is not None]
    return Gaps(entry, tuple(sorted(gap for record in records for gap in record.itls)), tuple(sorted(figures)))


def itl(entries: Sequence[Entry], load: Level) -> Picture | None:
    """Percentiles of the gaps at one load; None: no answer had two tokens."""
    shown = [gaps for entry in entries if load in entry.points if (gaps := gaps_of(entry, load)).all_gaps]
    if not shown:
        return None
    missing = [entry.brief for entry in entries if load in entry.points and entry not in [gaps.entry for gaps in shown]]

    def draw(frame: Frame) -> Sheet:
        return _draw(frame, shown)

    return Picture(
        key="itl-distribution",
        title=f"Inter-token latency at {load.at}, by percentile",
        finding=(
            *words.few([_finding(gaps) for gaps in shown]),
            *([f"No gaps in {words.joined(missing)}: no answer had two tokens."] if missing else []),
        ),
        note=(
            "Read from the right: at p99 one in a hundred is slower. Left: all gaps of all requests together. "
            f"Right: the figure of each request that the SLO is on ({_figures(shown)}), so a curve passes the line at "
            "the share of requests that meet it."
        ),
        table=Table(
            (
                "configuration",
                "of",
                "p50, ms",
                "p90, ms",
                "p99, ms",
                "p99.9, ms",
                "longest, ms",
                "above the SLO",
                "count",
            ),
            tuple(row for gaps in shown for row in _rows(gaps)),
            words=2,
        ),
        draw=draw,
    )


def _figures(shown: Sequence[Gaps]) -> str:
    return " or ".join(sorted({gaps.entry.slo.itl_of for gaps in shown}))


def _rows(gaps: Gaps) -> list[tuple[str, ...]]:
    limit = gaps.entry.slo.itl
    made = []
    for what, values in (("all gaps", gaps.all_gaps), (f"requests' {gaps.entry.slo.itl_of}", gaps.per_request)):
        above = words.percent(sum(value > limit for value in values) / len(values)) if limit is not None else words.NONE
        figures = (words.milliseconds(sorted_percentile(values, q)) for q in (50, 90, 99, 99.9, 100))
        made.append((gaps.entry.name, what, *figures, above, str(len(values))))
    return made


def _finding(gaps: Gaps) -> str:
    p50, p99 = (words.seconds(sorted_percentile(gaps.all_gaps, q)) for q in (50, 99))
    limit, values = gaps.entry.slo.itl, gaps.per_request
    said = f"{gaps.entry.brief}: p50 {p50}, p99 {p99} over all gaps"
    if limit is None:
        return f"{said}."
    over = sum(value > limit for value in values)
    return f"{said}; {over} of {len(values)} requests have a {gaps.entry.slo.itl_of} above {words.objective(limit)}."


_LOW = 0.25
"""Share of a panel's height below which the SLO is near its foot."""


def _draw(frame: Frame, shown: Sequence[Gaps]) -> Sheet:
    narrow = frame.width < 1000
    sheet = Sheet(frame, 624 if narrow else 364)
    left, right = band(sheet)
    each = right - left if narrow else (right - left - 70) / 2
    top = _top([gaps.all_gaps for gaps in shown] + [gaps.per_request for gaps in shown], shown)
    heads = ("every gap, ms", f"each request's {_figures(shown)}, ms")
    for place, head in enumerate(heads):
        x, y = (left, 30 + 310 * place) if narrow else (left + (each + 70) * place, 30)
        axes = sheet.panel(x, y, each, 235 if narrow else 285, grid="both")
        values = {gaps.entry.place: gaps.per_request if place else gaps.all_gaps for gaps in shown}
        deepest = 3.0 if max(len(row) for row in values.values()) >= 1000 else 2.0
        axes.set_xlim(0, deepest * 1.04)
        axes.set_ylim(0, top * 1000)
        marks = [q for q in SHARES if _depth(q) <= deepest]
        ticks(axes, "x", [_depth(q) for q in marks], [f"p{words.plain(q)}" if q else "p0" for q in marks])
        series = [_series(gaps.entry, values[gaps.entry.place], deepest, top) for gaps in shown]
        for one in series:
            axes.plot(one.xs, one.ys, color=palette.entry_colour(one.entry.place), linewidth=2,
                      dashes=palette.entry_dashes(one.entry.place) or (None, None))  # fmt: skip
        curves(sheet, axes, [_marked(gaps.entry, values[gaps.entry.place], marks, top) for gaps in shown],
               intervals=False, names=narrow or place == 1, joined=False)  # fmt: skip
        limits = {gaps.entry.slo.itl for gaps in shown}
        if len(limits) == 1 and (limit := limits.pop()) is not None:
            axes.axhline(limit * 1000, color=palette.SLO, linewidth=1.5, zorder=4)
            _, line = sheet.place_of(axes, 0, limit * 1000)
            said = f"SLO {words.objective(limit)}"
            if (
                limit < _LOW * top
            ):  # the fast ends of all curves are above it on the left: below it on the right is free
                sheet.words(x + each - 4, line + 9, said, align="right", colour=palette.SLO, size=11)
            else:
                sheet.words(x + 4, line - 9, said, colour=palette.SLO, size=11)
        sheet.words(x - (left if narrow else 40), y - 20, head, colour=palette.MUTED)
    said = "percentile"
    sheet.words(right, sheet.height - 14, said, align="right", colour=palette.MUTED)
    return sheet


def _depth(q: float) -> float:
    """Where a percentile stands: p0 at 0, p90 at 1, p99 at 2, so that the slow end has room."""
    return {0.0: 0.0, 50.0: 0.30103, 90.0: 1.0, 99.0: 2.0, 99.9: 3.0}[q]


def _series(entry: Entry, values: Sequence[float], deepest: float, top: float) -> Series:
    """The curve, at 160 places evenly spread over the axis."""
    depths = [deepest * step / 160 for step in range(161)]
    figures = [sorted_percentile(values, 100 * (1 - 10**-depth)) for depth in depths]
    return Series(entry, tuple(depths), tuple(min(figure, top) * 1000 for figure in figures))


def _marked(entry: Entry, values: Sequence[float], marks: Sequence[float], top: float) -> Series:
    """The curve's markers, at the percentiles that have a line."""
    shown = [q for q in marks if q]
    figures = [sorted_percentile(values, q) for q in shown]
    return Series(entry, tuple(_depth(q) for q in shown), tuple(min(figure, top) * 1000 for figure in figures))


def _top(rows: Sequence[Sequence[float]], shown: Sequence[Gaps]) -> float:
    """All that is inside p99.9, and the objective; a lone stall would press everything else flat."""
    most = max(sorted_percentile(row, 99.9) for row in rows if row)
    limit = max((gaps.entry.slo.itl or 0.0 for gaps in shown), default=0.0)
    return max(most, limit) * 1.08 or 1.0
