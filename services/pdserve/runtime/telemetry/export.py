"""Sends spans by OTLP over gRPC: OpenTelemetry's exporter, fed with messages that otlp.py has written.

Nobody waits for it: spans go into a bounded queue, a thread of our own sends them. It has nothing to do but to
wait for the collector, since what it computed would keep the loop from running. What cannot be sent is counted,
and said once per outage.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from pdserve.runtime.telemetry.otlp import Batch
from pdserve.runtime.telemetry.span import Counts, Span

log = structlog.get_logger(__name__)

_LAST_WORDS_S = 0.5
"""Seconds for the thread to see that its exporter was shut down."""
_LOUD = "opentelemetry.exporter.otlp.proto.grpc.exporter"
"""Logger of the SDK that says something for every batch; see `OtlpExport`."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How much is kept and how often it is sent."""

    queue: int = 16384
    """Most spans that wait; a request is about twenty."""
    batch: int = 2048
    """Most spans in one message, unless one trace has more: a trace is not split."""
    delay: float = 1.0
    """Seconds until a batch goes that is not full."""


class OtlpExport:
    """The exporter of a process; `send` is an `Export` of span.py. Made and used on one loop."""

    def __init__(
        self, endpoint: str, settings: ExportSettings | None = None, told: Callable[[], None] | None = None
    ) -> None:
        """`endpoint`: as OTEL_EXPORTER_OTLP_ENDPOINT has it; the other variables are read as they are. `told`: called
        on the loop when a batch has come to its end, however that was.

        Raises:
            ValueError: one of those variables makes no sense.
        """
        self._settings = settings or ExportSettings()
        self._shipped = 0
        """Spans that were put into the queue."""
        self._dropped = 0
        self._overflowing = False
        self._overflowed_at = 0
        """Spans that had been sent when the queue was full."""
        self._closed = False
        self._open = Batch()
        """Not in the queue yet; the loop's alone."""
        self._due: asyncio.TimerHandle | None = None
        self._sender = _Sender(endpoint, asyncio.get_running_loop(), told)
        logging.getLogger(_LOUD).setLevel(logging.CRITICAL + 1)  # what it says is counted here, and said once
        self._sender.start()

    @property
    def counts(self) -> Counts:
        """What has become of the spans so far."""
        return Counts(self._sender.exported, self._dropped, self._sender.failed)

    def send(self, spans: Sequence[Span]) -> None:
        """Takes the spans of one trace: all, or none where there is no room."""
        waiting = self._waiting
        if self._closed or waiting + len(spans) > self._settings.queue:
            self._dropped += len(spans)
            if not self._overflowing:
                self._overflowing = True
                self._overflowed_at = self._sender.exported
                log.warning("traces_dropped", waiting=waiting, closed=self._closed)
            return
        # Each batch that fails makes room for some, so that room alone is not the end of an outage.
        if self._sender.exported > self._overflowed_at and waiting <= self._settings.queue // 2:
            self._overflowing = False
        if len(self._open) and len(self._open) + len(spans) > self._settings.batch:
            self._ship()
        self._open.add(spans)
        if len(self._open) >= self._settings.batch:
            self._ship()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._settings.delay, self._ship)

    @property
    def _waiting(self) -> int:
        return len(self._open) + self._shipped - self._sender.taken

    def _ship(self) -> None:
        """What is open goes to the thread."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if len(self._open):
            self._shipped += len(self._open)
            self._sender.batches.put(self._open)
            self._open = Batch()

    async def aclose(self, seconds: float = 2.0) -> None:
        """Sends what is left, for at most `seconds`; safe twice. What is not sent then is counted as failed."""
        if self._closed:
            return
        self._closed = True
        self._ship()
        done = asyncio.Event()
        self._sender.finish(done.set)
        try:
            await asyncio.wait_for(done.wait(), seconds)
        except TimeoutError:
            log.warning("traces_cut_off", waiting=self._waiting)
            self._sender.cut_off()
            try:
                await asyncio.wait_for(done.wait(), _LAST_WORDS_S)
            except TimeoutError:
                log.error("traces_stuck", seconds=seconds + _LAST_WORDS_S)
        if done.is_set():
            self._sender.join()  # that was its last word


class _Otlp(OTLPSpanExporter):
    """The SDK's exporter (its variables, channel, retries, shutdown) for batches that are messages already.

    Overrides what the SDK's own exporters override, which is not public: test_export.py tells when it has changed, and
    then no trace is lost in silence, since each batch fails.
    """

    def _translate_data(self, data: Batch) -> ExportTraceServiceRequest:  # type: ignore[override]
        return data.request

    def _count_data(self, data: Batch) -> int:  # type: ignore[override]
        return len(data)


class _Sender(threading.Thread):
    """Sends one batch after the other, and counts. Its numbers are written by itself alone."""

    def __init__(self, endpoint: str, loop: asyncio.AbstractEventLoop, told: Callable[[], None] | None) -> None:
        super().__init__(name="traces-export", daemon=True)
        self.batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        """None: there will be no more."""
        self.taken = 0
        """Spans that have left the queue."""
        self.exported = 0
        self.failed = 0
        self._inner = _Otlp(endpoint=endpoint)
        self._endpoint = endpoint
        self._away = False
        self._loop = loop
        self._told = told
        self._done: Callable[[], None] | None = None

    def finish(self, done: Callable[[], None]) -> None:
        """Sends what is there, closes the channel, calls `done` on the loop, and ends."""
        self._done = done
        self.batches.put(None)

    def cut_off(self) -> None:
        """Ends the call that is open; what is still to be sent fails."""
        self._inner.shutdown()

    def run(self) -> None:
        """See Thread."""
        while (batch := self.batches.get()) is not None:
            self.taken += len(batch)
            self._send(batch)
            self._tell(self._told)
        self._inner.shutdown()
        self._tell(self._done)

    def _tell(self, listener: Callable[[], None] | None) -> None:
        if listener is None:
            return
        try:
            self._loop.call_soon_threadsafe(listener)
        except RuntimeError:
            log.debug("traces_told_late")  # the loop has ended meanwhile: nobody waits any more

    def _send(self, batch: Batch) -> None:
        try:
            result = self._inner.export(batch)  # type: ignore[arg-type]  # see _Otlp
        except Exception as error:  # noqa: BLE001 - a channel that is closed under a call raises what it likes
            result, why = SpanExportResult.FAILURE, repr(error)
        else:
            why = "the collector is away, or refused them"
        if result is SpanExportResult.SUCCESS:
            self.exported += len(batch)
            if self._away:
                log.info("traces_sent_again", endpoint=self._endpoint, failed=self.failed)
            self._away = False
        else:
            self.failed += len(batch)
            if not self._away:
                log.warning("traces_not_sent", endpoint=self._endpoint, because=why)
            self._away = True
