"""The report as one HTML page: gathers what the template shows, and renders it. Writes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from pdserve.bench.goodput import unproven
from pdserve.bench.report import comparison, figures, palette, ratios, words
from pdserve.bench.report.chapter import Chapter
from pdserve.bench.report.comparison import goodput_words
from pdserve.bench.report.contents import Contents
from pdserve.bench.report.entries import Entry, Level
from pdserve.bench.report.picture import Picture, Table

MOST_MESSAGE = 200
"""Characters of an error's message."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as the template takes it."""

    picture: Picture
    wide: str
    """An <svg> element, safe as it is."""
    narrow: str


def render(contents: Contents, chapters: Sequence[Chapter] = ()) -> str:
    """The whole page."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pdserve.bench.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("report.html.j2").render(context(contents), chapters=chapters)


def context(contents: Contents) -> dict[str, Any]:
    """Everything that the template names."""
    entries, load = contents.entries, contents.load
    same, differing = _facts(entries)
    return {
        "title": words.joined(
            [words.short(entry.label, 40) for entry in entries[:4]]
            + ([f"{len(entries) - 4} more"] if len(entries) > 4 else [])
        ),
        "entries": [
            {
                "letter": entry.letter,
                "label": entry.label,
                "colour": f"var(--entry-{entry.place % len(palette.ENTRIES)})",
                "partial": entry.partial,
                "doubts": [
                    f"at {load.at}: {doubt}"
                    for load, point in entry.points.items()
                    for doubt in dict.fromkeys(doubt for run in point.runs for doubt in run.doubts)
                ],
                "why": entry.results.why_partial or "a run broke off",
            }
            for entry in entries
        ],
        "load": load,
        "differences": comparison.differences(entries),
        "no_slo": all(entry.slo.empty for entry in entries),
        "headline": _headline(entries, load),
        "compared": _compared(entries, load) if load else None,
        "latencies": _latencies(entries, load) if load else None,
        "ratios": _ratios(entries) if len(entries) > 1 and load else None,
        "same": same,
        "differing": differing,
        "goodputs": _goodputs(entries),
        "sections": [
            {
                "title": section.title,
                "shown": [_drawn(picture) for picture in section.shown],
                "folded": [_drawn(picture) for picture in section.folded],
            }
            for section in contents.sections
        ],
        "runs": _runs(entries),
        "failures": failures(entries),
        "light": palette.variables(dark=False),
        "dark": palette.variables(dark=True),
    }


def failures(entries: Sequence[Entry]) -> Table:
    """How often each reason was met, most first, with the message that came first."""
    rows = []
    for entry in entries:
        for load, point in entry.points.items():
            found: dict[str, list[str]] = {}
            for record in (record for run in point.runs for record in run.requests):
                if record.error is not None:
                    found.setdefault(record.error.reason, []).append(record.error.message)
            for reason, messages in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
                said = words.short(" ".join(messages[0].split()), MOST_MESSAGE)
                rows.append((entry.name, load.at, reason, said, str(len(messages)), str(point.requests)))
    columns = ("configuration", "load", "reason", "first message", "failed", "of requests")
    return Table(columns, tuple(rows), words=4)


def _drawn(picture: Picture) -> Drawn:
    alt = " ".join((f"{picture.title}.", *picture.finding))
    made = []
    for suffix, width in (("w", figures.WIDE), ("n", figures.NARROW)):
        with figures.styled():
            sheet = picture.draw(figures.Frame(width))
        made.append(figures.svg(sheet, f"{picture.key}-{suffix}", alt))
    return Drawn(picture, *made)


def _headline(entries: Sequence[Entry], load: Level | None) -> list[dict[str, Any]]:
    """What the report comes to: one card a configuration."""
    if load is None:
        return []
    base, lines = entries[0], []
    for entry in entries:
        point = entry.points.get(load)
        name = {"letter": entry.letter, "label": words.short(entry.label, 60), "partial": entry.partial}
        if point is None:
            lines.append({**name, "figure": words.NONE, "says": [f"not measured at {load.at}"]})
            continue
        says = [f"{point.good} of {point.requests} requests met every SLO at {load.at}"]
        found = ratios.ratios(base.points.get(load), point)
        goodputs = ratios.goodput_ratio(base.goodput, entry.goodput)
        if len(entries) > 1 and not entry.place:
            says.append("the base that the others are compared with")
        if entry.place and found.attainment_range is not None:
            says.append(
                f"ratio of attainments at {load.symbol} to {base.letter}: {ratios.attainment_ratio_words(found)}"
            )
        if entry.place and goodputs.known.value is not None:
            says.append(f"ratio of goodputs to {base.letter}: {ratios.goodput_ratio_words(goodputs)}")
        lines.append({**name, "figure": words.percent(point.attainment), "says": says})
    return lines


def _goodputs(entries: Sequence[Entry]) -> Table | None:
    rows = [
        (
            entry.name,
            goodput_words(entry),
            words.percent(found.threshold),
            ", ".join(f"{words.plain(each.rate)}: {words.percent(each.attainment)}" for each in found.tried),
            "; ".join(filter(None, (unproven(found), found.why))),
        )
        for entry in entries
        if (found := entry.goodput) is not None
    ]
    columns = ("configuration", "goodput", "threshold", "attainment at each rate tried", "how it was found")
    return Table(columns, tuple(rows), words=5) if rows else None


def _compared(entries: Sequence[Entry], load: Level) -> Table:
    many = len(entries) > 1
    names = ratios.ratio_columns(load)
    rows = []
    for entry in entries:
        point = entry.points.get(load)
        found = ratios.ratios(entries[0].points.get(load), point)
        row = [entry.name + (" (partial)" if entry.partial else "")]
        if point is None:
            row += [words.NONE, words.NONE]
        else:
            row += [words.percent(point.attainment), f"{words.rate(point.good_rate)} req/s"]
        row.append(goodput_words(entry))
        if many and not entry.place:
            row += ["1 (base)"] * 3
        elif many:
            row += [ratios.attainment_ratio_words(found), words.ratio(found.good_rate)]
            row.append(ratios.goodput_ratio_words(ratios.goodput_ratio(entries[0].goodput, entry.goodput)))
        rows.append(tuple(row))
    columns = (
        "configuration",
        f"attainment at {load.symbol}",
        f"good rate at {load.symbol}",
        "goodput",
        *(names if many else ()),
    )
    return Table(columns, tuple(rows))


def _latencies(entries: Sequence[Entry], load: Level) -> Table:
    rows = []
    for entry in entries:
        point = entry.points.get(load)
        if point is not None:
            spreads = [
                words.seconds(point.spread(name, of)) for name in ("ttft", "itl") for of in ("p50", "p90", "p99")
            ]
            made = f"{words.rate(point.mean('output_token_throughput'))} tokens/s"
            rows.append((entry.name, *spreads, made, f"{point.failed} of {point.requests}"))
    columns = (
        "configuration",
        "TTFT p50",
        "TTFT p90",
        "TTFT p99",
        "ITL p50",
        "ITL p90",
        "ITL p99",
        "generated",
        "failed",
    )
    return Table(columns, tuple(rows))


def _ratios(entries: Sequence[Entry]) -> Table | None:
    rows = [
        (
            load.at,
            words.percent(entries[0].points[load].attainment),
            *(ratios.attainment_ratio_words(value) for value in values),
        )
        for load, values in ratios.every_load(entries)
    ]
    columns = ("load", f"attainment of {entries[0].name}", *(entry.name for entry in entries[1:]))
    return Table(columns, tuple(rows)) if len(rows) > 1 else None


def _facts(entries: Sequence[Entry]) -> tuple[list[tuple[str, str]], Table | None]:
    """What holds for all, and a table of what does not."""
    told = [comparison.facts(entry) for entry in entries]
    names = list(dict.fromkeys(name for fact in told for name in fact))
    same = [(name, told[0][name]) for name in names if len({fact.get(name) for fact in told}) == 1]
    other = [name for name in names if name not in dict(same)]
    if not other:
        return same, None
    rows = [
        (entry.name, *(fact.get(name, words.NONE) for name in other)) for entry, fact in zip(entries, told, strict=True)
    ]
    return same, Table(("configuration", *other), tuple(rows), words=len(other) + 1)


def _runs(entries: Sequence[Entry]) -> Table:
    rows = []
    for entry in entries:
        for point in entry.points.values():
            for run in point.runs:
                of = run.summary
                spreads = [
                    f"{words.milliseconds(spread.p50)} / {words.milliseconds(spread.p99)}" if spread else words.NONE
                    for spread in (of.ttft, of.itl, of.tpot, of.e2e, of.late)
                ]
                rows.append(
                    (
                        entry.name,
                        point.load.at,
                        "; ".join(("PARTIAL" if run.partial else "whole", *run.doubts)),
                        str(of.requests),
                        str(of.failed),
                        words.percent(of.attainment),
                        words.rate(of.good_rate),
                        words.rate(of.request_throughput),
                        words.rate(of.output_token_throughput),
                        *spreads,
                        words.digits(run.duration),
                    )
                )
    columns = (
        "configuration", "load", "run", "requests", "failed", "attainment", "good rate, req/s",
        "completed, req/s", "generated, tokens/s",
        *(f"{name} p50 / p99, ms" for name in ("TTFT", "ITL", "TPOT", "E2E", "late")), "duration, s",
    )  # fmt: skip
    return Table(columns, tuple(rows), words=3)
