"""The figure of single requests: bars of TTFT and ITL against their objectives, a row for every configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.bench.report import palette, words
from pdserve.bench.report.entries import Entry, Level
from pdserve.bench.report.figures import Frame, Sheet, bars
from pdserve.bench.report.picture import Picture, Table
from pdserve.bench.results import Record
from pdserve.bench.slo import itl_figure

MOST_BARS = 250
"""In one panel; of more requests, each bar is the slowest of several in a row."""
CLIP = 3.5
"""A panel ends at this many times its objective: past it a bar is cut, and says so."""

State = Literal["met", "missed", "failed"]
Measure = Literal["ttft", "itl"]
MEASURES: tuple[Measure, Measure] = ("ttft", "itl")


@dataclass(frozen=True, slots=True)
class Bar:
    """One request, or the slowest of several in a row."""

    first: int
    """Index of the request."""
    last: int
    """Index of the last request that it stands for."""
    value: float | None
    """Seconds; None: there is none."""
    state: State


def value_of(entry: Entry, record: Record, measure: Measure) -> float | None:
    """What is held against the objective, seconds."""
    return record.ttft if measure == "ttft" else itl_figure(record.itls, entry.slo.itl_of)


def bars_of(entry: Entry, records: Sequence[Record], measure: Measure) -> list[Bar]:
    """By index; never more than `MOST_BARS`."""
    limit = entry.slo.ttft if measure == "ttft" else entry.slo.itl
    each = -(-len(records) // MOST_BARS)
    made = []
    for start in range(0, len(records), max(1, each)):
        group = records[start : start + each]
        values = [value for value in (value_of(entry, record, measure) for record in group) if value is not None]
        value = max(values, default=None)
        state: State = "met"
        if value is not None and limit is not None and value > limit:
            state = "missed"
        if any(record.error is not None for record in group):
            state = "failed"
        made.append(Bar(group[0].index, group[-1].index, value, state))
    return made


def records_of(entry: Entry, load: Level) -> list[Record]:
    """Of the first run at the load: a repetition's requests would lie on top of it."""
    return list(entry.points[load].runs[0].requests)


def requests(entries: Sequence[Entry], load: Level) -> Picture:
    """TTFT and ITL of every request at one load."""
    shown = [entry for entry in entries if load in entry.points]
    made: dict[tuple[int, Measure], list[Bar]] = {
        (entry.place, measure): bars_of(entry, records_of(entry, load), measure)
        for entry in shown
        for measure in MEASURES
    }
    tops = {
        "ttft": _top(shown, [bar for (_, measure), row in made.items() if measure == "ttft" for bar in row], "ttft"),
        "itl": _top(shown, [bar for (_, measure), row in made.items() if measure == "itl" for bar in row], "itl"),
    }

    def draw(frame: Frame) -> Sheet:
        narrow = frame.width < 1000
        block = 268.0 if narrow else 150.0
        sheet = Sheet(frame, 44 + block * len(shown))
        _legend(sheet)
        for place, entry in enumerate(shown):
            top = 40 + block * place
            sheet.mark(8, top + 6, entry.place)
            sheet.words(20, top + 6, entry.tag(26 if narrow else 60), bold=True)
            good = entry.points[load].runs[0].summary
            met = f"{round(good.attainment * good.requests)} of {good.requests} met every SLO"
            if narrow:
                sheet.words(20, top + 22, met, colour=palette.MUTED, size=11)
            else:
                sheet.words(sheet.width - 4, top + 6, met, align="right")
            half = (sheet.width - 44 - 60) / 2
            for side, measure in enumerate(MEASURES):
                left = 40.0 if narrow else 44 + (half + 56) * side
                above = top + (50 + 104 * side if narrow else 36)
                width = sheet.width - 44 if narrow else half
                _panel(sheet, (left, above, width, 76.0 if narrow else 84.0), entry, measure, made, tops[measure])
        return sheet

    return Picture(
        key=f"requests-{load.kind}-{words.plain(load.value).replace('.', '-')}",
        title=f"Every request at {load.at} against its objectives",
        finding=words.few([_finding(entry, load) for entry in shown]),
        note=_note(shown, load),
        table=_table(shown, load, made),
        draw=draw,
    )


def _top(entries: Sequence[Entry], row: Sequence[Bar], measure: Measure) -> float:
    """Where the panels of a measure end: the same for all configurations, so that bars can be compared."""
    limits = [limit for entry in entries if (limit := getattr(entry.slo, measure)) is not None]
    most = max([bar.value for bar in row if bar.value is not None] + limits, default=0.0)
    if limits and most > CLIP * max(limits):
        most = CLIP * max(limits)
    return most * 1.08 or 1.0


def _panel(
    sheet: Sheet,
    box: tuple[float, float, float, float],
    entry: Entry,
    measure: Measure,
    made: dict[tuple[int, Measure], list[Bar]],
    top: float,
) -> None:
    row = made[entry.place, measure]
    unit, scale = ("s", 1.0) if top >= 1 else ("ms", 1000.0)
    left, above, width, height = box
    axes = sheet.panel(left, above, width, height, grid="y", steps=3)
    # As long as the longest row: of a run that broke off the missing requests are a gap, not wider bars.
    axes.set_xlim(-0.8, max(max(len(other) for other in made.values()) - 0.2, 0.8))
    axes.set_ylim(0, top * scale)
    axes.set_xticks([])
    for state, colour, hatch in (("met", palette.MET, ""), ("missed", palette.MISSED, "////")):
        some = [(x, bar.value) for x, bar in enumerate(row) if bar.state == state and bar.value is not None]
        bars(axes, [x for x, _ in some], [min(value, top) * scale for _, value in some], 0.74, colour, hatch)
    failed = [x for x, bar in enumerate(row) if bar.state == "failed"]
    axes.plot(
        failed, [0.06 * top * scale] * len(failed), marker="x", markersize=5, markeredgewidth=1.6, linestyle="none",
        color=palette.INK,
    )  # fmt: skip
    cut = [x for x, bar in enumerate(row) if bar.value is not None and bar.value > top]
    axes.plot(
        cut, [top * scale] * len(cut), marker="^", markersize=4, linestyle="none", color=palette.MISSED, clip_on=False
    )
    what = "TTFT" if measure == "ttft" else f"ITL, {entry.slo.itl_of} of each request"
    sheet.words(left, above - 12, f"{what}, {unit}", colour=palette.MUTED, size=11)
    limit = getattr(entry.slo, measure)
    if limit is not None:
        axes.axhline(limit * scale, color=palette.SLO, linewidth=1.5, zorder=4)
        _, y = sheet.place_of(axes, 0, limit * scale)
        over = sum(bar.value is not None and bar.value > limit for bar in row)
        sheet.words(
            left + width, above - 12, _beside(limit, over, len(cut)), align="right", colour=palette.SLO, size=11
        )
        sheet.stroke([(left + width, y), (left + width + 4, y)], palette.SLO)
    elif not row or all(bar.value is None for bar in row):
        sheet.words(left + width / 2, above + height / 2, "no value", align="center", colour=palette.MUTED)


def _beside(limit: float, over: int, cut: int) -> str:
    past = f", {cut} past the top" if cut else ""
    return f"SLO {words.objective(limit)}: {over} above{past}"


def _legend(sheet: Sheet) -> None:
    sheet.block(0, 6, 12, 12, palette.MET)
    sheet.words(17, 12, "met")
    sheet.block(52, 6, 12, 12, palette.MISSED, "////")
    sheet.words(69, 12, "missed")
    sheet.words(122, 12, "×  failed", bold=False)
    sheet.words(188, 12, "▲  past the top")


def _finding(entry: Entry, load: Level) -> str:
    records = records_of(entry, load)
    said = []
    for measure in MEASURES:
        limit = getattr(entry.slo, measure)
        if limit is not None:
            over = sum((value_of(entry, record, measure) or 0.0) > limit for record in records)
            said.append(f"{over} above the {measure.upper()} of {words.objective(limit)}")
    failed = sum(record.error is not None for record in records)
    if failed:
        said.append(f"{failed} failed")
    return f"{entry.brief}: of {words.count(len(records), 'request')} {words.joined(said) or 'none failed'}."


def _note(entries: Sequence[Entry], load: Level) -> str:
    most = max((len(records_of(entry, load)) for entry in entries), default=0)
    each = -(-most // MOST_BARS)
    said = "In the order in which they were due." if each <= 1 else f"Each bar is the slowest of {each} in a row."
    if any(len(entry.points[load].runs) > 1 for entry in entries):
        said += " Of repeated runs the first is shown."
    return f"{said} A bar that goes past the top is cut and marked. The scale is the same in every row."


def _table(entries: Sequence[Entry], load: Level, made: dict[tuple[int, Measure], list[Bar]]) -> Table:
    ms: Callable[[float | None], str] = words.milliseconds
    rows = []
    for entry in entries:
        records = {record.index: record for record in records_of(entry, load)}
        for first, second in zip(made[entry.place, "ttft"], made[entry.place, "itl"], strict=True):
            which = str(first.first) if first.first == first.last else f"{first.first} to {first.last}"
            missed = sorted({name for at in range(first.first, first.last + 1) if at in records
                             for name in records[at].missed})  # fmt: skip
            due = words.digits(records[first.first].due)
            rows.append((entry.name, which, due, ms(first.value), ms(second.value), ", ".join(missed) or "none"))
    itl_of = sorted({entry.slo.itl_of for entry in entries})
    return Table(
        ("configuration", "request", "due, s", "TTFT, ms", f"ITL ({' or '.join(itl_of)}), ms", "missed"), tuple(rows)
    )
