"""The figure of attainment over the offered load, with the goodput that follows from it."""

from collections.abc import Sequence

from pdserve.bench.goodput import THRESHOLD
from pdserve.bench.report import palette, words
from pdserve.bench.report.comparison import goodput_words
from pdserve.bench.report.entries import Entry, Kind, Level, Point
from pdserve.bench.report.figures import Axes, Frame, Sheet
from pdserve.bench.report.figures_curves import Row, band, curves, dots, percent_tick, rows_sheet
from pdserve.bench.report.figures_load import AXIS, OVER, at_the_load, load_axes, series_of, single
from pdserve.bench.report.picture import Picture, Table


def attainment(entries: Sequence[Entry], kind: Kind, load: Level) -> Picture:
    """Share of requests that meet every objective, over the load, and the goodput that follows."""
    series = [series_of(entry, kind, lambda point: point.attainment, lambda point: point.interval) for entry in entries]
    found = [entry for entry in entries if entry.goodput] if kind == "rate" else []
    limits = sorted({entry.goodput.threshold for entry in found if entry.goodput}) or [THRESHOLD]

    def draw(frame: Frame) -> Sheet:
        if single(entries, kind):
            return _single_load(frame, entries, kind, "attainment: share of requests that meet every SLO", 1.0)
        room = 24 * len(found) + 34 if found else 0
        sheet = Sheet(frame, 370 + room)
        _, right = band(sheet)
        axes = load_axes(sheet, 30, 290, series)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: percent_tick(value))
        for limit in limits:
            axes.axhline(limit, color=palette.INK, linewidth=1, dashes=(5, 3), zorder=1)
            _, y = sheet.place_of(axes, 0, limit)
            # To the right, where most curves have fallen below it.
            sheet.words(right - 4, y - 9, f"{words.percent(limit)}: goodput's threshold", align="right", size=11)
        _single_runs(axes, entries, kind)
        curves(sheet, axes, series, intervals=len(entries) <= 4)
        for entry in found if len(found) <= 6 else ():
            _mark_goodput(axes, entry)
        sheet.words(0, 10, "attainment: share of requests that meet every SLO", colour=palette.MUTED)
        if found:
            _goodput_rows(sheet, found, axes.get_xlim(), 290 + 62)
        sheet.words(right, 352 + room, AXIS[kind], align="right", colour=palette.MUTED)
        return sheet

    def says(point: Point) -> str:
        return words.percent(point.attainment)

    drawn = found and not single(entries, kind)
    repeated = any(len(point.runs) > 1 for entry in entries for point in entry.of(kind))

    title = f"Attainment over {OVER[kind]}" + (", and the goodput it gives" if drawn else "")
    return Picture(
        key=f"attainment-{kind}",
        title=title,
        finding=(
            *at_the_load(entries, load, "share of requests that meet every SLO", says, kind),
            *(
                [f"Goodput: {words.listed([f'{entry.brief} {goodput_words(entry)}' for entry in found])}"]
                if found
                else []
            ),
        ),
        note=(
            "Shaded or pale: the 95 % interval of a share of so many requests (Wilson), were they independent. "
            + ("Small dots: single runs of those that were repeated. " if repeated else "")
            + (
                "Goodput's bar runs from the highest rate that held by more than its interval to the lowest above it "
                "that fell significantly short."
                if drawn
                else ""
            )
        ),
        table=Table(
            ("configuration", "load", "attainment", "met", "requests", "95 % interval", "runs"),
            tuple(
                (
                    entry.name,
                    point.load.at,
                    words.percent(point.attainment),
                    str(point.good),
                    str(point.requests),
                    f"{words.percent(point.interval[0])} to {words.percent(point.interval[1])}",
                    _each_run(point),
                )
                for entry in entries
                for point in entry.of(kind)
            ),
            words=2,
        ),
        draw=draw,
    )


def _each_run(point: Point) -> str:
    """How many runs, and of repeated ones what each came to."""
    said = f"{len(point.runs)}{' (partial)' if point.partial else ''}"
    if len(point.runs) == 1:
        return said
    return f"{said}: {', '.join(words.percent(run.summary.attainment) for run in point.runs)}"


def _single_runs(axes: Axes, entries: Sequence[Entry], kind: Kind) -> None:
    """Of repeated runs each one, so that their drift is seen."""
    for entry in entries:
        pairs = [
            (point.load.value, run.summary.attainment)
            for point in entry.of(kind)
            if len(point.runs) > 1
            for run in point.runs
        ]
        axes.plot(
            [x for x, _ in pairs], [y for _, y in pairs], marker="o", markersize=4, linestyle="none", alpha=0.55,
            color=palette.entry_colour(entry.place), clip_on=False,
        )  # fmt: skip


def _mark_goodput(axes: Axes, entry: Entry) -> None:
    found = entry.goodput
    if found is not None and found.value > 0:
        axes.plot(
            [found.value], [found.threshold], marker=palette.entry_marker(entry.place), markersize=12, linestyle="none",
            markerfacecolor="none", markeredgecolor=palette.entry_colour(entry.place), markeredgewidth=2, zorder=4,
        )  # fmt: skip


def _goodput_rows(sheet: Sheet, found: Sequence[Entry], limits: tuple[float, float], top: float) -> None:
    """Below the curves and on their axis: one line a configuration, from its `low` to its `high`."""
    left, right = band(sheet)
    axes = sheet.panel(left, top + 14, right - left, 24 * len(found), grid="x")
    axes.set_xlim(limits)
    rows = []
    for entry in found:
        goodput = entry.goodput
        if goodput is not None:
            high = goodput.high if goodput.high is not None else goodput.value
            value = goodput.value if goodput.value > 0 else None
            says = f"{entry.letter}  {goodput_words(entry)}".lstrip()
            rows.append(Row(entry, entry.letter, value, goodput.low, high, says, goodput.high is None))
    dots(sheet, axes, rows)
    axes.tick_params(axis="x", labelbottom=False)
    sheet.words(0, top, "goodput: highest rate that holds the threshold", colour=palette.MUTED)


def _single_load(frame: Frame, entries: Sequence[Entry], kind: Kind, unit: str, top: float) -> Sheet:
    rows = []
    for entry in entries:
        for point in entry.of(kind):
            says = f"{words.percent(point.attainment)} at {point.load.at} ({point.good} of {point.requests})"
            rows.append(Row(entry, entry.tag(), point.attainment, *point.interval, says))
    return rows_sheet(frame, rows, unit, top, percent_tick)
