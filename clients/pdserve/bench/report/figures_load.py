"""The figures of good rate and throughput over the offered load, and what all figures over the load share."""

import operator
from collections.abc import Callable, Sequence

from pdserve.bench.report import palette, words
from pdserve.bench.report.entries import Entry, Kind, Level, Point
from pdserve.bench.report.figures import Axes, Frame, Sheet
from pdserve.bench.report.figures_curves import Row, Series, band, curves, rows_sheet
from pdserve.bench.report.picture import Picture, Table

AXIS = {"rate": "offered rate, requests per second", "concurrency": "requests kept in flight"}
OVER = {"rate": "the offered rate", "concurrency": "the requests in flight"}


def good_rate(entries: Sequence[Entry], kind: Kind, load: Level) -> Picture:
    """Good requests a second over the load."""
    series = [series_of(entry, kind, lambda point: point.good_rate) for entry in entries]

    def draw(frame: Frame) -> Sheet:
        if single(entries, kind):
            return _single_rate(frame, entries, kind, "good_rate", "good rate: requests per second that meet every SLO")
        sheet = Sheet(frame, 350)
        _, right = band(sheet)
        axes = load_axes(sheet, 30, 270, series)
        axes.set_ylim(0, _top(series))
        if kind == "rate":
            _diagonal(sheet, axes, "every request good")
        curves(sheet, axes, series, intervals=False)
        sheet.words(0, 10, "good rate: requests per second that meet every SLO", colour=palette.MUTED)
        sheet.words(right, 332, AXIS[kind], align="right", colour=palette.MUTED)
        return sheet

    def says(point: Point) -> str:
        return f"{words.rate(point.good_rate)} req/s"

    means = "attainment x offered rate" if kind == "rate" else "good requests over the run's duration"
    return Picture(
        key=f"good-rate-{kind}",
        title=f"Good rate over {OVER[kind]}",
        finding=at_the_load(entries, load, "good rate", says, kind),
        note=f"Good rate is {means}.",
        table=Table(
            ("configuration", "load", "good rate, req/s"),
            tuple(
                (entry.name, point.load.at, words.rate(point.good_rate))
                for entry in entries
                for point in entry.of(kind)
            ),
            words=2,
        ),
        draw=draw,
    )


def throughput(entries: Sequence[Entry], kind: Kind, load: Level) -> Picture:
    """Completed requests and generated tokens a second over the load."""
    names = ("request_throughput", "output_token_throughput")
    heads = ("completed requests per second", "generated tokens per second")
    both = [[series_of(entry, kind, operator.methodcaller("mean", name)) for entry in entries] for name in names]

    def draw(frame: Frame) -> Sheet:
        if single(entries, kind):
            return _single_rate(frame, entries, kind, names[1], heads[1])
        narrow = frame.width < 1000
        sheet = Sheet(frame, 616 if narrow else 330)
        left, right = band(sheet)
        each = right - left if narrow else (right - left - 70) / 2
        for place, series in enumerate(both):
            x, y = (left, 30 + 300 * place) if narrow else (left + (each + 70) * place, 30)
            axes = load_axes(sheet, y, 225 if narrow else 250, series, x, each)
            axes.set_ylim(0, _top(series))
            if kind == "rate" and place == 0:
                _diagonal(sheet, axes, "as many as offered")
            curves(sheet, axes, series, intervals=False, names=narrow or place == 1)
            sheet.words(x - (left if narrow else 40), y - 20, heads[place], colour=palette.MUTED)
        sheet.words(right, sheet.height - 14, AXIS[kind], align="right", colour=palette.MUTED)
        return sheet

    def says(point: Point) -> str:
        return f"{words.rate(point.mean('output_token_throughput'))} tokens/s"

    return Picture(
        key=f"throughput-{kind}",
        title=f"Throughput over {OVER[kind]}",
        finding=at_the_load(entries, load, "generated", says, kind),
        note="Over the whole run, its slow end included: a short run at a high rate shows less than a long one would.",
        table=Table(
            ("configuration", "load", "requests/s", "generated tokens/s", "all tokens/s", "duration, s"),
            tuple(
                (
                    entry.name,
                    point.load.at,
                    words.rate(point.mean("request_throughput")),
                    words.rate(point.mean("output_token_throughput")),
                    words.rate(point.mean("total_token_throughput")),
                    words.digits(sum(run.duration for run in point.runs) / len(point.runs)),
                )
                for entry in entries
                for point in entry.of(kind)
            ),
            words=2,
        ),
        draw=draw,
    )


def series_of(
    entry: Entry,
    kind: Kind,
    value: Callable[[Point], float],
    interval: Callable[[Point], tuple[float, float]] | None = None,
) -> Series:
    """A figure of every point of one configuration, and where it may truly be."""
    points = entry.of(kind)
    ranges = [interval(point) for point in points] if interval else []
    return Series(
        entry,
        tuple(point.load.value for point in points),
        tuple(value(point) for point in points),
        tuple(low for low, _ in ranges),
        tuple(high for _, high in ranges),
    )


def single(entries: Sequence[Entry], kind: Kind) -> bool:
    """Whether no configuration was measured at more than one load: there is no curve to draw."""
    return all(len(entry.of(kind)) <= 1 for entry in entries)


def load_axes(
    sheet: Sheet, top: float, height: float, series: Sequence[Series], left: float = 0, width: float = 0
) -> Axes:
    """A panel whose x axis is the load, from 0."""
    edge, right = band(sheet)
    axes = sheet.panel(left or edge, top, width or right - edge, height, grid="both")
    xs = [x for each in series for x in each.xs]
    axes.set_xlim(0, max(xs, default=1.0) * 1.02)
    return axes


def _top(series: Sequence[Series]) -> float:
    return max((y for each in series for y in each.ys), default=0.0) * 1.12 or 1.0


def _diagonal(sheet: Sheet, axes: Axes, says: str) -> None:
    """The line that would be reached if nothing were lost."""
    most = min(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([0, most], [0, most], color=palette.MUTED, linewidth=1, dashes=(2, 2), zorder=1)
    along = most * (0.8 if sheet.narrow else 0.5)
    x, y = sheet.place_of(axes, along, along)
    sheet.words(x - 8, y - 8, says, align="right", colour=palette.MUTED, size=11)


def _single_rate(frame: Frame, entries: Sequence[Entry], kind: Kind, name: str, unit: str) -> Sheet:
    rows = []
    for entry in entries:
        for point in entry.of(kind):
            value = point.mean(name)
            says = f"{words.rate(value)} at {point.load.at}"
            rows.append(Row(entry, entry.tag(), value, value, value, says))
    top = max((row.value or 0.0 for row in rows), default=0.0) * 1.1 or 1.0
    return rows_sheet(frame, rows, unit, top, words.plain)


def at_the_load(
    entries: Sequence[Entry], load: Level, what: str, says: Callable[[Point], str], kind: Kind
) -> tuple[str, ...]:
    """One sentence for all configurations at the load that they are compared at."""
    points = [(entry, entry.points[load]) for entry in entries if load in entry.points] if load.kind == kind else []
    if not points:
        return ("No configuration was measured at the load of the comparison.",)
    return (f"At {load.at}, {what}: {words.listed([f'{entry.brief} {says(point)}' for entry, point in points])}",)
