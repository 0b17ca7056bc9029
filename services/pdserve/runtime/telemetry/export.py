"""Sends spans by OTLP over gRPC: OpenTelemetry's batch processor and exporter, fed with our values.

The only module of the services that imports opentelemetry. Nobody waits for it: spans go into a
bounded queue, a thread of the processor's own sends them. What cannot be sent is counted, and said
once per outage.
"""

import asyncio
import functools
import importlib.metadata
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Kind, Service, Span

log = structlog.get_logger(__name__)

_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
_SCOPE = InstrumentationScope("pdserve", importlib.metadata.version("pdserve"))
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LAST_WORDS_S = 0.5
"""Seconds for the thread to see that its exporter was shut down."""
_LOUD = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the SDK that say something for every batch and every span; see `OtlpExport`."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How much is kept and how often it is sent."""

    queue: int = 16384
    """Most spans that wait; a request is about twenty."""
    batch: int = 512
    """Most spans in one message."""
    delay: float = 1.0
    """Seconds until a batch goes that is not full."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Spans since the start."""

    exported: int
    """The collector has taken them."""
    dropped: int
    """The queue was full; whole traces."""
    failed: int
    """The collector was away, or refused them."""


class OtlpExport:
    """The exporter of a process; `send` is an `Export` of span.py. Made and used on one loop."""

    def __init__(self, endpoint: str, settings: ExportSettings | None = None) -> None:
        """`endpoint`: as OTEL_EXPORTER_OTLP_ENDPOINT has it; the other variables are read as they are.

        Raises:
            ValueError: one of those variables makes no sense.
        """
        self._settings = settings or ExportSettings()
        self._queued = 0
        self._dropped = 0
        self._overflowing = False
        self._sender = _Sender(OTLPSpanExporter(endpoint=endpoint), endpoint)
        for name in _LOUD:  # what they say is counted here, and said once
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self._processor = BatchSpanProcessor(
            self._sender,
            max_queue_size=self._settings.queue,
            max_export_batch_size=min(self._settings.batch, self._settings.queue),
            schedule_delay_millis=self._settings.delay * 1000,
        )
        self._closed = False

    @property
    def counts(self) -> Counts:
        """What has become of the spans so far."""
        return Counts(self._sender.exported, self._dropped, self._sender.failed)

    def send(self, spans: Sequence[Span]) -> None:
        """Takes the spans of one trace: all, or none where there is no room."""
        waiting = self._queued - self._sender.taken
        if self._closed or waiting + len(spans) > self._settings.queue:
            self._dropped += len(spans)
            if not self._overflowing:
                self._overflowing = True
                log.warning("traces_dropped", waiting=waiting, closed=self._closed)
            return
        self._overflowing = False
        self._queued += len(spans)
        for span in spans:
            self._processor.on_end(_readable(span))

    async def aclose(self, seconds: float = 2.0) -> None:
        """Sends what is left, for at most `seconds`; safe twice. What is not sent then is counted as failed."""
        if self._closed:
            return
        self._closed = True
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A thread of its own: the loop's pool would be waited for at the end, for as long as it takes.
        thread = threading.Thread(target=_flush, args=(self._processor, loop, done), name="traces-flush", daemon=True)
        thread.start()
        try:
            await asyncio.wait_for(done.wait(), seconds)
        except TimeoutError:
            log.warning("traces_cut_off", waiting=self._queued - self._sender.taken)
            self._sender.shutdown()
            try:
                await asyncio.wait_for(done.wait(), _LAST_WORDS_S)
            except TimeoutError:
                log.error("traces_stuck", seconds=seconds + _LAST_WORDS_S)
        if done.is_set():
            thread.join()  # that was its last word
        log.info("traces_closed", exported=self._sender.exported, dropped=self._dropped, failed=self._sender.failed)


class _Sender(SpanExporter):
    """The OTLP exporter, counted. Called by the processor's thread alone but for `shutdown`."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._away = False
        self.taken = 0
        """Spans that have left the queue."""
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        self.taken += len(spans)
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - a channel that is closed under a call raises what it likes
            result, why = SpanExportResult.FAILURE, repr(error)
        else:
            why = "the collector is away, or refused them"
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if self._away:
                log.info("traces_sent_again", endpoint=self._endpoint, failed=self.failed)
            self._away = False
        else:
            self.failed += len(spans)
            if not self._away:
                log.warning("traces_not_sent", endpoint=self._endpoint, because=why)
            self._away = True
        return result

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._inner.shutdown()


def _flush(processor: BatchSpanProcessor, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK has no type for it
    try:
        loop.call_soon_threadsafe(done.set)
    except RuntimeError:
        log.debug("traces_closed_late")  # the loop has ended meanwhile: nobody waits any more


def _readable(span: Span) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id, remote=span.remote_parent) if span.parent_id else None,
        resource=_resource(span.service),
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
        links=[Link(_context(link.trace_id, link.span_id)) for link in span.links],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.status.message) if span.status.failed else Status(),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: str, span_id: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, _SAMPLED)


@functools.lru_cache(maxsize=256)
def _resource(service: Service) -> Resource:
    said = {names.SERVICE_NAME: service.name, names.SERVICE_VERSION: importlib.metadata.version("pdserve")}
    if service.instance_id:
        said[names.SERVICE_INSTANCE] = service.instance_id
    attributes = dict(Resource.create(said).attributes)
    if not service.instance_id:
        attributes.pop(names.SERVICE_INSTANCE, None)  # the SDK makes one up, of this process, which it need not be
    return Resource(attributes)
