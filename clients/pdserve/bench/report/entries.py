"""What is compared: every results file as one entry with a letter, its runs grouped by load. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.bench.goodput import good_rate, wilson
from pdserve.bench.report import words
from pdserve.bench.results import Goodput, Results, Run
from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError

Kind = Literal["rate", "concurrency"]


@dataclass(frozen=True, slots=True, order=True)
class Level:
    """What was offered: an arrival rate, or a number of requests kept in flight."""

    kind: Kind
    value: float
    """Requests a second, or requests."""

    @property
    def at(self) -> str:
        """As it stands in a sentence after `at`."""
        return f"{words.plain(self.value)} req/s" if self.kind == "rate" else f"{words.plain(self.value)} in flight"

    @property
    def symbol(self) -> str:
        """As it stands in the name of a ratio."""
        return f"r = {words.plain(self.value)}" if self.kind == "rate" else f"N = {words.plain(self.value)}"


def level_of(run: Run) -> Level:
    """The load of a run; equal rates are equal whatever their last bits are.

    Raises:
        ConfigError: it says neither a rate nor a number in flight.
    """
    if run.rate is not None:
        return Level("rate", float(f"{run.rate:.9g}"))
    if run.concurrency is not None:
        return Level("concurrency", float(run.concurrency))
    raise ConfigError("a run has neither a rate nor a concurrency")


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration at one load; several runs at the same load are pooled."""

    load: Level
    runs: tuple[Run, ...]

    @property
    def requests(self) -> int:
        """Of all runs."""
        return sum(run.summary.requests for run in self.runs)

    @property
    def good(self) -> int:
        """Requests that met every objective."""
        return sum(round(run.summary.attainment * run.summary.requests) for run in self.runs)

    @property
    def failed(self) -> int:
        """Of all runs."""
        return sum(run.summary.failed for run in self.runs)

    @property
    def attainment(self) -> float:
        """Of all runs' requests together, in [0, 1]."""
        if len(self.runs) == 1 or not self.requests:
            return self.runs[0].summary.attainment
        return self.good / self.requests

    @property
    def good_rate(self) -> float:
        """Good requests a second: attainment x the offered rate; of a closed loop the mean over the runs."""
        return good_rate(self.attainment, self.load.value) if self.load.kind == "rate" else self.mean("good_rate")

    @property
    def each(self) -> tuple[float, ...]:
        """Attainment of each run, in order."""
        return tuple(run.summary.attainment for run in self.runs)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share is, with 95 % confidence, were the requests independent."""
        return wilson(self.attainment, self.requests)

    @property
    def partial(self) -> bool:
        """Whether a run of it broke off."""
        return any(run.partial for run in self.runs)

    def mean(self, name: str) -> float:
        """The mean over the runs of a figure of their summaries."""
        values = [float(getattr(run.summary, name)) for run in self.runs]
        return sum(values) / len(values)

    def spread(self, name: str, figure: str) -> float | None:
        """The mean over the runs of one figure of a distribution: ("ttft", "p99"); None where no run has it."""
        values = self.spreads(name, figure)
        return sum(values) / len(values) if values else None

    def spreads(self, name: str, figure: str) -> tuple[float, ...]:
        """The same figure of each run that has it, in order."""
        found = (getattr(run.summary, name) for run in self.runs)
        return tuple(float(getattr(spread, figure)) for spread in found if spread is not None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One results file."""

    place: int
    """From 0; 0 is the base that the others are compared with."""
    letter: str
    """Its name in the figures: A is the base, where no others were given. Empty where it is the only one."""
    label: str
    results: Results
    points: Mapping[Level, Point]
    """By load, ascending."""

    @property
    def slo(self) -> Slo:
        """What its requests had to meet."""
        return self.results.slo

    @property
    def goodput(self) -> Goodput | None:
        """As its file has it."""
        return self.results.goodput

    @property
    def partial(self) -> bool:
        """Whether something of it broke off."""
        return self.results.partial or any(run.partial for run in self.results.runs)

    @property
    def name(self) -> str:
        """Letter and label."""
        return f"{self.letter} {self.label}".lstrip()

    @property
    def brief(self) -> str:
        """Letter and label for a sentence."""
        return f"{self.letter} {words.short(self.label, 36)}".lstrip()

    def tag(self, most: int = 30) -> str:
        """Letter and label, short enough for a figure, and whether it is partial."""
        return f"{self.letter}  {words.short(self.label, most)}{' (partial)' if self.partial else ''}".lstrip()

    def of(self, kind: Kind) -> list[Point]:
        """Its points of one kind of load, ascending."""
        return [point for load, point in self.points.items() if load.kind == kind]


def entries_of(results: Sequence[Results], letters: Sequence[str] = ()) -> tuple[Entry, ...]:
    """The files in the order given, the first as base. `letters`: one each; none: A, B, and so on.

    Raises:
        ConfigError: there is no file.
    """
    if not results:
        raise ConfigError("a report needs at least one results file")
    if not letters:
        letters = [_letter(place) if len(results) > 1 else "" for place in range(len(results))]
    return tuple(_entry(place, letter, each) for place, (letter, each) in enumerate(zip(letters, results, strict=True)))


def chosen_level(entries: Sequence[Entry], rate: float | None) -> Level | None:
    """The load at which configurations are compared: `rate` where it is told, else the highest of those that most
    entries were measured at. None: there is no run at all.

    Raises:
        ConfigError: no entry was measured at `rate`.
    """
    loads = all_levels(entries)
    if rate is not None:
        told = Level("rate", float(f"{rate:.9g}"))
        if told not in loads:
            known = ", ".join(words.plain(load.value) for load in loads if load.kind == "rate") or "none"
            raise ConfigError(f"no file has a run at {words.plain(rate)} req/s; there are: {known}")
        return told
    # "concurrency" sorts before "rate", so of equals an offered rate wins.
    return max(loads, key=lambda load: (sum(load in entry.points for entry in entries), load), default=None)


def all_levels(entries: Sequence[Entry]) -> list[Level]:
    """Every load of any entry, ascending."""
    return sorted({load for entry in entries for load in entry.points})


def points_of(runs: Sequence[Run]) -> dict[Level, Point]:
    """The runs by load, ascending.

    Raises:
        ConfigError: a run says neither a rate nor a number in flight.
    """
    grouped: dict[Level, list[Run]] = {}
    for run in runs:
        grouped.setdefault(level_of(run), []).append(run)
    return {load: Point(load, tuple(grouped[load])) for load in sorted(grouped)}


def _entry(place: int, letter: str, results: Results) -> Entry:
    label = " ".join(results.label.split()) or " ".join(filter(None, (results.target.model, results.target.mode)))
    return Entry(place, letter, label or "unnamed", results, points_of(results.runs))


def _letter(place: int) -> str:
    return "".join(reversed(list(_letters(place))))


def _letters(place: int) -> Iterator[str]:
    # A … Z, AA, AB: as a spreadsheet names its columns.
    number = place + 1
    while number:
        number, rest = divmod(number - 1, 26)
        yield chr(ord("A") + rest)
