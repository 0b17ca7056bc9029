"""A sink that traces in a process of its own (child.py): hands each record on, and keeps one such process running.

Nobody waits for it: what it cannot take is dropped and counted. One that dies is started again, after a while that
grows, and what it had not sent is counted too.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NoReturn, Self

import structlog

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.process import Process
from pdserve.proxy.tracing.size import most_spans
from pdserve.proxy.tracing.undrawn import Undrawn
from pdserve.proxy.tracing.wire import Report, pack
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.clock import Clock
from pdserve.runtime.lifecycle import Tasks
from pdserve.runtime.log import LogFormat, LogLevel
from pdserve.runtime.telemetry.span import Counts

log = structlog.get_logger(__name__)

CLOSE_S: Final = 4.0
"""Seconds that the process gets to send what it has and to end; it gives its collector two of them."""
_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 30.0
"""Between the death of one process and the start of the next; twice as long each time."""
_WELL_S: Final = 60.0
"""One that has lived so long has done well: the next starts after the shortest time again."""
_CALM_S: Final = 10.0
"""Without a record that was dropped, until the next one is said again."""


def command(delay: float, form: LogFormat, level: LogLevel, *, urgent: bool = False) -> list[str]:
    """How the process is started. `delay`: see ExportSettings; its log goes where the proxy's goes. `urgent`: it gets a
    share of a full machine (child.py)."""
    module = [sys.executable, "-P", "-m", "pdserve.proxy.tracing.child"]  # -P: no module out of the current folder
    flags = [f"--delay={delay}", f"--log-format={form.value}", f"--log-level={level.value}"]
    return [*module, *flags, *(["--urgent"] if urgent else [])]


class Apart:
    """An `ended.Sink`; `async with` starts and ends the process. On one loop."""

    def __init__(self, argv: Sequence[str], clock: Clock) -> None:
        """`argv`: see `command`."""
        self._argv = argv
        self._clock = clock
        self._tasks = Tasks()
        self._process: Process | None = None
        """None: there is none just now."""
        self._over = asyncio.Event()
        """The process that was told to end has ended."""
        self._closed = False
        self._able = False
        """One has been there to draw: what the next refuses is no fault of the configuration."""
        self._past = Counts(0, 0, 0)
        """Of the processes before this one, and of those that none has drawn."""
        self._untold = Undrawn(clock)
        """Records that not even the process could be told."""
        self._dropped_at = -math.inf
        """Monotonic seconds."""

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self) -> None:
        """Starts the process; once."""
        self._tasks.start("traces", self._run())

    def behind(self, seconds: float) -> bool:
        """Whether a record has waited longer than this to be drawn, or the last one found no room."""
        return self._process is not None and (self._process.full or self._process.waiting > seconds)

    def __call__(self, ended: Ended) -> None:
        """Hands the record on, or drops it."""
        try:
            spans = most_spans(ended)
            parcel = pack(ended, self._clock.unix_ns() - self._clock.monotonic_ns())
        except Exception as defect:  # noqa: BLE001 - a record that cannot be told must not spoil the answer
            self._untold.add(defect, request_id=ended.request_id, trace_id=ended.trace_id)
            return
        if self._process is not None and self._process.give(parcel, spans):
            return
        self._past = replace(self._past, dropped=self._past.dropped + spans)
        now = self._clock.monotonic()
        if now - self._dropped_at > _CALM_S:
            log.warning("traces_dropped", running=self._process is not None, bytes=len(parcel))
        self._dropped_at = now

    @property
    def counts(self) -> Counts:
        """What has become of the spans so far. Those of a record that was not drawn are as many as it can have."""
        counts = self._past if self._process is None else _sum(self._past, self._process.report)
        return replace(counts, undrawn=counts.undrawn + self._untold.count)

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none just now."""
        return 0 if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        """It is there to draw."""
        return self._process is not None and self._process.able

    @property
    def unread(self) -> int:
        """Records that it has been given and is not through with."""
        return 0 if self._process is None else self._process.unread

    async def failed(self) -> NoReturn:
        """Waits until there will be no process any more.

        Raises:
            ConfigError: one of OpenTelemetry's variables makes no sense.
            PdserveError: a defect.
        """
        await self._tasks.failed()

    async def aclose(self, seconds: float = CLOSE_S) -> None:
        """Lets the process send what it has, for at most so long; safe twice. What is not sent then has failed."""
        if self._closed:
            return
        self._closed = True
        process = self._process
        if process is not None and (process.ready or process.owed):
            process.finish()
            try:
                await asyncio.wait_for(self._over.wait(), seconds)
            except TimeoutError:
                log.warning("traces_cut_off", waiting=process.owed)
        await self._tasks.aclose()
        counts = self.counts
        log.info(
            "traces_closed",
            exported=counts.exported,
            dropped=counts.dropped,
            failed=counts.failed,
            undrawn=counts.undrawn,
        )

    async def _run(self) -> None:
        """One process after the other."""
        pause = _SHORTEST_S
        while True:
            begun = self._clock.monotonic()
            how, refused, lost = await self._live()
            if self._closed:
                self._over.set()
                await asyncio.Event().wait()  # for aclose, which ends this task
            if refused and not self._able:
                raise ConfigError(f"OTEL_EXPORTER_OTLP_...: {refused}")
            if self._clock.monotonic() - begun > _WELL_S:
                pause = _SHORTEST_S
            log.warning("traces_process_ended", how=refused or how, lost=lost, again_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    async def _live(self) -> tuple[str, str, int]:
        """One process, from start to end: how it ended, why it could not even begin, spans that it took along."""
        try:
            process = self._process = await Process.start(self._argv)
        except OSError as error:
            return f"not started: {error.strerror}", "", 0
        try:
            status = await process.ended()
        finally:
            self._process = None
            self._able = self._able or process.able
            said = _sum(self._past, process.report)
            self._past = replace(said, failed=said.failed + process.owed)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return how, process.report.refused, process.owed


def _sum(counts: Counts, report: Report) -> Counts:
    return Counts(
        exported=counts.exported + report.exported,
        dropped=counts.dropped + report.dropped,
        failed=counts.failed + report.failed,
        undrawn=counts.undrawn + report.undrawn,
    )
