"""What the report contains: its entries, the load of the comparison, and the figures in their order. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.report.entries import Entry, Kind, Level, all_levels, chosen_level, entries_of
from pdserve.bench.report.figures_attainment import attainment
from pdserve.bench.report.figures_itl import itl
from pdserve.bench.report.figures_load import good_rate, single, throughput
from pdserve.bench.report.figures_parts import parts_at, parts_of
from pdserve.bench.report.figures_requests import requests
from pdserve.bench.report.picture import Picture
from pdserve.bench.results import Results


@dataclass(frozen=True, slots=True)
class Section:
    """Figures that belong together."""

    title: str
    shown: tuple[Picture, ...]
    folded: tuple[Picture, ...] = ()
    """Opened by whoever wants them."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The report before it is drawn."""

    entries: tuple[Entry, ...]
    load: Level | None
    """Where configurations are compared; None: there is no run."""
    sections: tuple[Section, ...]

    @property
    def pictures(self) -> list[Picture]:
        """All figures, in order."""
        return [picture for section in self.sections for picture in (*section.shown, *section.folded)]


def contents_of(results: Sequence[Results], rate: float | None = None, letters: Sequence[str] = ()) -> Contents:
    """Of the files in the order given: the first is the base. `rate`: where to compare, requests a second; `letters` as
    `entries_of` takes them.

    Raises:
        ConfigError: there is no file, or none has a run at `rate`.
    """
    entries = entries_of(results, letters)
    load = chosen_level(entries, rate)
    if load is None:
        return Contents(entries, None, ())
    loads = all_levels(entries)
    kinds: list[Kind] = [kind for kind in ("rate", "concurrency") if any(each.kind == kind for each in loads)]
    kinds.sort(key=lambda kind: kind != load.kind)
    over_load = []
    for kind in kinds:
        over_load.append(attainment(entries, kind, load))
        # Of one run good rate and throughput are two numbers, which the tables have.
        if len(entries) > 1 or not single(entries, kind):
            over_load += [good_rate(entries, kind, load), throughput(entries, kind, load)]
    sections = [
        Section("Over the load", tuple(over_load)),
        Section(
            "Time to first token",
            tuple(filter(None, (parts_at(entries, load),))),
            tuple(filter(None, (parts_of(entry) for entry in entries))),
        ),
        Section("Between tokens", tuple(filter(None, (itl(entries, load),)))),
        Section(
            "Every request",
            (requests(entries, load),),
            tuple(requests(entries, other) for other in loads if other != load),
        ),
    ]
    return Contents(entries, load, tuple(section for section in sections if section.shown or section.folded))
