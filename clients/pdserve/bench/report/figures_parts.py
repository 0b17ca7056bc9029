"""The figure of what the time to first token consists of: one stacked bar a run, parts in path order."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.report import palette, words
from pdserve.bench.report.entries import Entry, Level, Point
from pdserve.bench.report.figures import Frame, Sheet, ticks
from pdserve.bench.report.picture import Picture, Table

UNATTRIBUTED = "unattributed"
OUTSIDE = "before and after the server"
PLAIN = {UNATTRIBUTED: "||||", OUTSIDE: "xxx"}
"""What is no part: an empty box, hatched."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The mean time to first token of one configuration at one load."""

    entry: Entry
    load: Level
    segments: tuple[tuple[str, float], ...]
    """Part and seconds, in path order; what is unexplained comes last."""
    ttft: float
    """The mean as the client measured it, seconds: of the requests that have parts."""
    p50: float | None
    """The median of the same, seconds."""
    requests: int
    """How many have parts."""


def stack_of(entry: Entry, point: Point) -> Stack | None:
    """Means of the requests that have both a TTFT and parts; None: there are none.

    Means, since medians of parts do not add up to the median of the whole.
    """
    records = [record for run in point.runs for record in run.requests if record.parts and record.ttft is not None]
    if not records:
        return None
    names = ordered({name for record in records for name in record.parts})
    many = len(records)
    segments = [(name, sum(record.parts.get(name, 0.0) for record in records) / many) for name in names]
    unattributed = sum(record.unattributed for record in records) / many
    whole = [record.ttft for record in records if record.ttft is not None]
    ttft = sum(whole) / many
    outside = ttft - sum(value for _, value in segments) - unattributed
    segments.append((UNATTRIBUTED, unattributed))
    segments.append((OUTSIDE, max(0.0, outside)))
    middle = sorted(whole)
    p50 = (middle[(many - 1) // 2] + middle[many // 2]) / 2
    return Stack(entry, point.load, tuple(segments), ttft, p50, many)


def ordered(names: set[str]) -> list[str]:
    """In path order; parts that this version does not know come last, by name."""
    known = [name for name in palette.PARTS if name in names]
    return known + sorted(names - set(palette.PARTS))


def parts_at(entries: Sequence[Entry], load: Level) -> Picture | None:
    """A bar for every configuration at one load; None: nobody has parts there."""
    stacks = [stack for entry in entries if load in entry.points if (stack := stack_of(entry, entry.points[load]))]
    if not stacks:
        return None
    without = [entry.brief for entry in entries if load in entry.points and entry not in [s.entry for s in stacks]]
    missing = [f"No parts came with {words.joined(without)}."] if without else []
    return _picture("ttft-parts", f"What the time to first token consists of, at {load.at}", stacks, missing)


def parts_of(entry: Entry) -> Picture | None:
    """A bar for every load of one configuration; None: it has no parts, or but one load."""
    stacks = [stack for point in entry.points.values() if (stack := stack_of(entry, point))]
    if len(stacks) < 2:
        return None
    return _picture(
        f"ttft-parts-{entry.letter.lower() or 'all'}", f"TTFT parts of {entry.name}, every load", stacks, []
    )


def _picture(key: str, title: str, stacks: Sequence[Stack], missing: Sequence[str]) -> Picture:
    names = ordered({name for stack in stacks for name, _ in stack.segments if name not in PLAIN}) + list(PLAIN)
    loads = len({stack.load for stack in stacks}) > 1

    def draw(frame: Frame) -> Sheet:
        return _draw(frame, names, stacks, loads)

    return Picture(
        key=key,
        title=title,
        finding=(*words.few([_finding(stack, loads) for stack in stacks]), *missing),
        note=(
            "Means over the requests that have parts, in the order of the path; means, as medians of parts do not add "
            "up. The triangle below a bar is at the median TTFT. Unattributed: no stamp explains it. The part before "
            "and after the server is the client's TTFT less all that the server explains."
        ),
        table=Table(
            ("configuration", "load", *(f"{name}, ms" for name in names), "TTFT mean, ms", "TTFT p50, ms", "requests"),
            tuple(
                (
                    stack.entry.name,
                    stack.load.at,
                    *(words.milliseconds(dict(stack.segments).get(name)) for name in names),
                    words.milliseconds(stack.ttft),
                    words.milliseconds(stack.p50),
                    str(stack.requests),
                )
                for stack in stacks
            ),
            words=2,
        ),
        draw=draw,
        keyed=not loads,
    )


def _finding(stack: Stack, loads: bool) -> str:
    largest = sorted(stack.segments, key=lambda segment: -segment[1])[:3]
    said = words.joined([f"{name} {words.seconds(value)}" for name, value in largest if value > 0])
    return f"{stack.load.at if loads else stack.entry.brief}: {words.seconds(stack.ttft)}, of it {said}."


_TOP = 44
"""Of the bars, pixels: above them are a line of heads and one of the SLO."""


def _draw(frame: Frame, names: Sequence[str], stacks: Sequence[Stack], loads: bool) -> Sheet:
    narrow = frame.width < 1000
    shown = [name for name in names if any(_seen(stack, name) for stack in stacks)]
    columns = 1 if narrow else 4
    legend = 22 * -(-len(shown) // columns) + 26
    pitch = 40 if narrow else 34
    sheet = Sheet(frame, _TOP + 16 + pitch * len(stacks) + legend)
    left = (72.0 if loads else 30.0) if narrow else (110.0 if loads else 250.0)
    width = sheet.width - left - (66 if narrow else 200)
    axes = sheet.panel(left, _TOP, width, pitch * len(stacks), grid="x")
    top = max(max(stack.ttft, stack.p50 or 0.0, sum(v for _, v in stack.segments)) for stack in stacks) or 1.0
    unit, scale = ("s", 1.0) if top >= 2 else ("ms", 1000.0)
    axes.set_xlim(0, top * scale * 1.03)
    axes.set_ylim(len(stacks) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    labels = [stack.load.at if loads else stack.entry.letter if narrow else stack.entry.tag() for stack in stacks]
    ticks(axes, "y", range(len(stacks)), labels)
    axes.tick_params(axis="y", colors=palette.INK)
    sheet.words(left, 12, f"time to first token, {unit}", colour=palette.MUTED)
    limits, mark = {stack.entry.slo.ttft for stack in stacks}, None
    if len(limits) == 1 and (limit := limits.pop()) is not None and limit <= top * 1.03:
        axes.axvline(limit * scale, color=palette.SLO, linewidth=1.5, zorder=4)
        mark, _ = sheet.place_of(axes, limit * scale, 0)
        sheet.words(mark + 4, 32, f"SLO {words.objective(limit)}", colour=palette.SLO, size=11)
    for row, stack in enumerate(stacks):
        start = 0.0
        for name, value in stack.segments:
            if value > 0:
                colour, ink, hatch = _look(name, names)
                axes.barh(row, value * scale, 0.62, start * scale, color=colour, edgecolor=palette.SURFACE,
                          linewidth=0.8)  # fmt: skip
                if hatch:
                    edge = palette.MUTED if name in PLAIN else palette.SURFACE
                    axes.barh(row, value * scale, 0.62, start * scale, color="none", edgecolor=edge, linewidth=0.8,
                              hatch=hatch)  # fmt: skip
                room = value / top / 1.03 * width
                said = _inside(name, names.index(name) + 1, room)
                if said:
                    x, y = sheet.place_of(axes, (start + value / 2) * scale, row)
                    if hatch and name not in PLAIN:
                        sheet.block(x - 3.6 * len(said) - 3, y - 7, 7.2 * len(said) + 6, 14, colour)
                    if mark is not None and abs(x - mark) < 3.6 * len(said) + 4 and room > 14.4 * len(said) + 40:
                        x += (3.6 * len(said) + 12) * (1 if x >= mark else -1) - (x - mark)
                    sheet.words(x, y, said, colour=ink, align="center", size=11)
            start += value
        if stack.p50 is not None:
            axes.plot([stack.p50 * scale], [row + 0.37], marker="^", markersize=7, color=palette.INK, zorder=5,
                      markeredgecolor=palette.SURFACE, markeredgewidth=1, clip_on=False)  # fmt: skip
        x, y = sheet.place_of(axes, axes.get_xlim()[1], row)
        sheet.words(x + 8, y, words.seconds(stack.ttft) if narrow else _beside(stack))
    x = left + (150 if narrow else 160)
    sheet.words(x, 12, "▲ median", colour=palette.MUTED, size=11)
    _legend(sheet, shown, names, _TOP + 16 + pitch * len(stacks) + 26, columns)
    return sheet


def _beside(stack: Stack) -> str:
    return f"mean {words.seconds(stack.ttft)},  p50 {words.seconds(stack.p50)}"


def _seen(stack: Stack, name: str) -> bool:
    return dict(stack.segments).get(name, 0.0) > 0


def _look(name: str, names: Sequence[str]) -> tuple[str, str, str]:
    """Colour, colour of words on it, hatch."""
    if name in PLAIN:
        return palette.SURFACE, palette.INK, PLAIN[name]
    other = palette.OTHER_PARTS[names.index(name) % len(palette.OTHER_PARTS)], palette.DARK_TEXT
    return *palette.PARTS.get(name, other), palette.HATCHED.get(name, "")


def _inside(name: str, number: int, room: float) -> str:
    """What fits into a segment: its number and name, its number, or nothing."""
    full = f"{number} {name}"
    if room > 7.2 * len(full) + 10 and name not in PLAIN:
        return full
    return str(number) if room > 16 and name not in PLAIN else ""


def _legend(sheet: Sheet, shown: Sequence[str], names: Sequence[str], top: float, columns: int) -> None:
    rows = -(-len(shown) // columns)
    for place, name in enumerate(shown):
        column, row = divmod(place, rows)
        x, y = column * sheet.width / columns, top + 22 * row
        colour, _, hatch = _look(name, names)
        sheet.block(x + 1, y - 6, 16, 12, colour, hatch, palette.MUTED if name in PLAIN else palette.SURFACE)
        sheet.words(x + 24, y, f"{names.index(name) + 1}  {name}")
