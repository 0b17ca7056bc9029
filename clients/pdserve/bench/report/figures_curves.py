"""Lines over the offered load with their names at their ends, and rows of dots where there is but one load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.report import palette, words
from pdserve.bench.report.entries import Entry
from pdserve.bench.report.figures import Axes, Frame, Sheet, ticks
from pdserve.bench.report.layout import apart


@dataclass(frozen=True, slots=True)
class Series:
    """One configuration's line."""

    entry: Entry
    xs: tuple[float, ...]
    """Ascending."""
    ys: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Where the true value may be, if it is known: as many as `ys`."""
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of dots: a value and where it may truly be."""

    entry: Entry
    label: str
    value: float | None
    low: float
    high: float
    says: str
    """Stands to its right."""
    open_ended: bool = False
    """Whether the true value may lie beyond `high`."""


def band(sheet: Sheet) -> tuple[float, float]:
    """Left and right edge of a plot on this sheet: room for numbers on one side, for names on the other."""
    return (40.0, sheet.width - 28) if sheet.narrow else (56.0, sheet.width - 250)


def curves(
    sheet: Sheet, axes: Axes, series: Sequence[Series], *, intervals: bool, names: bool = True, joined: bool = True
) -> None:
    """Draws lines, or only their markers, into limits that have been set; `intervals`: shades where they may be."""
    for each in series:
        colour = palette.entry_colour(each.entry.place)
        if intervals and each.low and len(each.xs) > 1:
            axes.fill_between(each.xs, each.low, each.high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            each.xs,
            each.ys,
            color=colour,
            linewidth=2 if joined else 0,
            dashes=palette.entry_dashes(each.entry.place) or (None, None),
            marker=palette.entry_marker(each.entry.place),
            markersize=7,
            markeredgecolor=palette.SURFACE,
            markeredgewidth=1,
            clip_on=False,
            zorder=3,
        )
    if names:
        _names(sheet, axes, series)


def _names(sheet: Sheet, axes: Axes, series: Sequence[Series]) -> None:
    """Every line's name beside its last point, moved apart, with a thin lead where it had to move."""
    shown = [each for each in series if each.xs]
    ends = [sheet.place_of(axes, each.xs[-1], each.ys[-1]) for each in shown]
    left, top = sheet.place_of(axes, axes.get_xlim()[1], axes.get_ylim()[1])
    _, bottom = sheet.place_of(axes, axes.get_xlim()[1], axes.get_ylim()[0])
    gap = min(17.0, max(9.0, (bottom - top) / max(1, len(shown) - 1)))
    for each, (x, y), place in zip(shown, ends, apart([y for _, y in ends], gap, top, bottom), strict=True):
        colour = palette.entry_colour(each.entry.place)
        label = left + (10 if sheet.narrow else 26)
        if not sheet.narrow:
            sheet.stroke([(x + 7, y), (max(x + 7, left + 4), y), (label - 4, place)])
        name = each.entry.letter if sheet.narrow else each.entry.tag(26)
        sheet.words(label, place, name, colour=colour, bold=True, size=12 if gap > 12 else 9)


def dots(sheet: Sheet, axes: Axes, rows: Sequence[Row]) -> None:
    """Draws rows of dots with their intervals, the first on top; the panel's y limits are set here."""
    axes.set_ylim(len(rows) - 0.5, -0.5)
    ticks(axes, "y", range(len(rows)), [row.label for row in rows])
    axes.tick_params(axis="y", colors=palette.INK)
    edge = axes.get_xlim()[1]
    for place, row in enumerate(rows):
        colour = palette.entry_colour(row.entry.place)
        x, y = sheet.place_of(axes, edge, place)
        sheet.words(x + (8 if sheet.narrow else 26), y, "" if sheet.narrow else row.says, colour=palette.INK)
        if row.value is None:
            continue
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        if row.open_ended:
            away = row.high + 0.015 * edge
            axes.plot([away], [place], marker=">", color=colour, markersize=7, linestyle="none", clip_on=False)
        axes.plot(
            [row.value], [place], marker=palette.entry_marker(row.entry.place), color=colour, markersize=9,
            markeredgecolor=palette.SURFACE, markeredgewidth=1, linestyle="none", clip_on=False, zorder=3,
        )  # fmt: skip
        if sheet.narrow:
            _, above = sheet.place_of(axes, edge, place - 0.36)
            sheet.words(x, above, row.says, align="right", colour=palette.MUTED, size=11)


def rows_sheet(frame: Frame, rows: Sequence[Row], unit: str, top: float, shown: Callable[[float], str]) -> Sheet:
    """A whole figure of dots from 0 to `top`, under `unit`."""
    narrow = frame.width < 1000
    pitch = 44 if narrow else 30
    sheet = Sheet(frame, 60 + pitch * len(rows))
    left = 36.0 if narrow else 250.0
    axes = sheet.panel(left, 32, sheet.width - left - (20 if narrow else 230), pitch * len(rows), grid="x")
    axes.set_xlim(0, top)
    axes.xaxis.set_major_formatter(lambda value, _: shown(value))
    dots(sheet, axes, [_lettered(row) for row in rows] if narrow else rows)
    sheet.words(left, 14, unit, colour=palette.MUTED)
    return sheet


def _lettered(row: Row) -> Row:
    return Row(row.entry, row.entry.letter, row.value, row.low, row.high, row.says, row.open_ended)


def percent_tick(value: float) -> str:
    """A tick of a share."""
    return f"{words.plain(value * 100)} %"
