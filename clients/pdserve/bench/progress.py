"""Shows a run as it goes: a live display on a terminal, a line now and then elsewhere."""

import asyncio
import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from pdserve.bench.endpoint import Clock
from pdserve.bench.plan import Load
from pdserve.bench.report.words import seconds
from pdserve.bench.results import Record, Run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from pdserve.bench.measure import View

_REFRESH_S = 1.0
"""Drawing takes 2 ms, in which no token is stamped: once a second that is 0.2 % of the tokens."""
_LINE_S = 10.0


class Counts:
    """How far a run is."""

    def __init__(self, load: Load, total: int) -> None:
        self.load = load
        self.total = total
        self.sent = self.done = self.failed = self.good = 0
        self._ttfts: list[float] = []

    def ended(self, record: Record) -> None:
        """Counts one."""
        self.done += 1
        self.failed += record.error is not None
        self.good += not record.missed
        if record.error is None and record.ttft is not None:  # as the summary counts it
            self._ttfts.append(record.ttft)

    def __str__(self) -> str:
        median = f", TTFT p50 {seconds(statistics.median(self._ttfts))}" if self._ttfts else ""
        good = f"{self.good / self.done:.0%} good" if self.done else "none done"
        return f"{self.sent} sent, {self.sent - self.done} in flight, {self.failed} failed, {good}{median}"


class Lines:
    """A plain line at most every 10 s; what a log file gets."""

    def __init__(self, clock: Clock, out: TextIO | None = None) -> None:
        self._clock = clock
        self._out = out or sys.stderr
        self._counts: Counts | None = None
        self._next = 0.0

    def begin(self, load: Load, requests: int) -> None:
        """See View."""
        self._counts = Counts(load, requests)
        self._next = self._clock() + _LINE_S

    def sent(self) -> None:
        """See Watch."""
        if self._counts:
            self._counts.sent += 1

    def ended(self, record: Record) -> None:
        """See Watch."""
        if self._counts is None:
            return
        self._counts.ended(record)
        if self._clock() >= self._next:
            self._next = self._clock() + _LINE_S
            self.say(f"{self._counts.load}: {self._counts.done} of {self._counts.total} done; {self._counts}")

    def end(self, run: Run) -> None:
        """See View."""
        if self._counts:
            self.say(f"{self._counts.load}: {run.duration:.1f} s; {self._counts}")

    def say(self, line: str) -> None:
        """See View."""
        self._out.write(f"{line}\n")
        self._out.flush()


class Live:
    """A bar a run, drawn by rich. Use `live`."""

    def __init__(self, progress: "Progress", console: "Console") -> None:
        self._progress = progress
        self._console = console
        self._counts: Counts | None = None
        self._task: TaskID | None = None

    def begin(self, load: Load, requests: int) -> None:
        """See View."""
        self._counts = Counts(load, requests)
        self._task = self._progress.add_task(str(load), total=requests, counts="")
        self.draw()

    def sent(self) -> None:
        """See Watch."""
        if self._counts:
            self._counts.sent += 1

    def ended(self, record: Record) -> None:
        """See Watch."""
        if self._counts:
            self._counts.ended(record)

    def end(self, run: Run) -> None:
        """See View."""
        self.draw()

    def say(self, line: str) -> None:
        """See View."""
        self._console.print(line, markup=False, highlight=False)

    def draw(self) -> None:
        """Shows what has been counted."""
        if self._counts and self._task is not None:
            self._progress.update(self._task, completed=self._counts.done, counts=str(self._counts))
        self._progress.refresh()


@contextlib.contextmanager
def shown(*, plain: bool) -> "Iterator[View]":
    """A live display where stderr is a terminal, lines elsewhere or where `plain` says so."""
    if sys.stderr.isatty() and not plain:
        with live(sys.stderr) as view:
            yield view
    else:
        yield Lines(asyncio.get_running_loop().time)


@contextlib.contextmanager
def live(out: TextIO) -> Iterator[Live]:
    """A display that the running event loop draws again every second: no thread takes the lock from the stamps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=out)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[counts]}", markup=False),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        view = Live(progress, console)

        async def redraw() -> None:
            while True:
                await asyncio.sleep(_REFRESH_S)
                view.draw()

        task = asyncio.get_running_loop().create_task(redraw(), name="progress display")
        try:
            yield view
        finally:
            task.cancel()
