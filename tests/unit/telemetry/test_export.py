"""Spans to a collector, as OTLP says them; and what happens without one: nothing that a request could notice.

Fake: the collector, over a real port.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from pdserve.rpc.errors import ConfigError
from pdserve.runtime.telemetry import settings
from pdserve.runtime.telemetry.export import ExportSettings, OtlpExport
from pdserve.runtime.telemetry.span import Kind, Link, Service, Span, SpanEvent, Status
from tests.unit.telemetry.collector import Collector

QUICK = ExportSettings(queue=40, batch=10, delay=0.02)
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """Served."""
    collector = Collector()
    await collector.start()
    yield collector
    await collector.kill()


def span(number: int = 1) -> Span:
    """One of a trace."""
    return Span(TRACE, f"{number:016x}", "", "pdserve.request", Service("pdserve-proxy"), 1_000, 2_000)


async def test_a_span_arrives_as_it_is(collector: Collector) -> None:
    """Ids, times, kind, status, attributes of every type, events, links, and a resource for each service."""
    exporter = OtlpExport(collector.endpoint, QUICK)
    whole = Span(
        trace_id=TRACE,
        span_id="b7ad6b7169203331",
        parent_id="00f067aa0ba902b7",
        name="pdserve.attempt",
        service=Service("pdserve-decode", "engine-1"),
        start_ns=1_700_000_000_000_000_001,
        end_ns=1_700_000_000_000_000_777,
        kind=Kind.CLIENT,
        attributes={"text": "a", "truth": True, "count": 3, "seconds": 0.25, "many": ("x", "y")},
        events=(SpanEvent("first_token", 1_700_000_000_000_000_100, {"at": 1}),),
        links=(Link(TRACE, "00f067aa0ba902b8"),),
        status=Status(True, "ENGINE_DIED: gone"),
        remote_parent=True,
    )
    exporter.send([whole, span()])
    await collector.until(lambda: len(collector.spans) == 2)
    await exporter.aclose()
    assert [received.value() for received in collector.spans] == [whole, span()]
    raw, other = collector.spans
    assert (raw.span.kind, raw.span.status.code, other.span.status.code) == (3, 2, 0)
    assert raw.resource["service.version"]
    assert "service.instance.id" not in other.resource
    assert exporter.counts.exported == 2


async def test_headers_go_along(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_OTLP_HEADERS reaches the collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=serving")
    exporter = OtlpExport(collector.endpoint, QUICK)
    exporter.send([span()])
    await collector.until(lambda: bool(collector.spans))
    await exporter.aclose()
    assert collector.metadata[0]["x-team"] == "serving"


async def test_what_waits_is_sent_at_the_end(collector: Collector) -> None:
    """Closing does not lose what the delay still held back."""
    exporter = OtlpExport(collector.endpoint, ExportSettings(delay=3600.0))
    exporter.send([span(number) for number in range(1, 6)])
    await exporter.aclose()
    assert [received.span.span_id.hex() for received in collector.spans] == [f"{n:016x}" for n in range(1, 6)]
    assert (exporter.counts.exported, exporter.counts.failed) == (5, 0)
    await exporter.aclose()


async def test_a_trace_is_not_split(collector: Collector) -> None:
    """A message has whole traces, as many as fit; a trace that is larger than a message may be has one for itself. What
    fills a message goes at once, what does not after the delay."""
    exporter = OtlpExport(collector.endpoint, ExportSettings(queue=100, batch=10, delay=3600.0))
    numbers = iter(range(1, 100))
    for size in (4, 4, 4, 12, 10, 3):
        exporter.send([span(next(numbers)) for _ in range(size)])
    await collector.until(lambda: len(collector.spans) == 34)
    assert collector.sizes == [8, 4, 12, 10]
    await exporter.aclose()
    assert collector.sizes == [8, 4, 12, 10, 3]
    assert [one.span.span_id.hex() for one in collector.spans] == [f"{n:016x}" for n in range(1, 38)]


async def test_a_collector_that_is_away_costs_counters(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """`send` never waits; the queue fills and whole traces are dropped; batches fail. One line for the outage, one for
    the queue, one when it is over, however many batches there were."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporter = OtlpExport(collector.endpoint, QUICK)
    exporter.send([span()])
    await _until(lambda: exporter.counts.exported == 1)  # the answer has come too, so that it is not sent again
    await collector.kill()
    with capture_logs() as lines:
        longest = 0.0
        for number in range(30):
            before = time.perf_counter()
            exporter.send([span(number * 5 + extra + 1) for extra in range(5)])
            longest = max(longest, time.perf_counter() - before)
        assert longest < 1.0, "nobody waits for a collector: that would take its timeout"
        assert exporter.counts.dropped >= 30 * 5 - QUICK.queue - QUICK.batch
        assert exporter.counts.dropped % 5 == 0
        await _until(lambda: exporter.counts.failed >= 2 * QUICK.batch)
        await collector.start()
        await _until(lambda: exporter.counts.exported + exporter.counts.failed + exporter.counts.dropped == 151)
        exporter.send([span(999)])
        await collector.until(lambda: any(one.span.span_id.hex() == f"{999:016x}" for one in collector.spans))
        await exporter.aclose()
    events = [line["event"] for line in lines]
    assert events.count("traces_not_sent") == events.count("traces_dropped") == events.count("traces_sent_again") == 1
    # A batch whose answer came too late has arrived, and counts as failed.
    counts = exporter.counts
    assert counts.exported <= len(collector.spans) <= counts.exported + counts.failed


async def test_an_outage_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More traces come than have room, and each batch that fails makes room for some: still one line for the queue."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    exporter = OtlpExport("http://127.0.0.1:1", QUICK)
    with capture_logs() as lines:

        async def come() -> None:
            while True:
                for _ in range(2 * QUICK.queue // 5):
                    exporter.send([span(extra + 1) for extra in range(5)])
                await asyncio.sleep(0.001)

        coming = asyncio.ensure_future(come())
        await _until(lambda: exporter.counts.failed >= 10 * QUICK.batch)
        coming.cancel()
        await exporter.aclose(0.1)
    events = [line["event"] for line in lines]
    assert (events.count("traces_dropped"), events.count("traces_not_sent")) == (1, 1)


async def test_closing_is_bounded(collector: Collector) -> None:
    """A collector that takes a call and never answers holds a stop up for as long as it may, and no thread stays."""
    exporter = OtlpExport(collector.endpoint, QUICK)
    collector.silent = True
    exporter.send([span()])
    await asyncio.sleep(0.1)
    before = time.perf_counter()
    await exporter.aclose(0.3)
    assert time.perf_counter() - before < 5.0, "that is half of a call's own deadline"
    assert exporter.counts.failed == 1
    exporter.send([span(2)])
    assert exporter.counts.dropped == 1
    left = [thread.name for thread in threading.enumerate() if "Otel" in thread.name or "traces" in thread.name]
    assert left == []


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "TRUE"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "no"}, "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "b"}, "b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": " "}, "a"),
    ],
)
def test_where_traces_go(environ: dict[str, str], where: str) -> None:
    """The more exact variable first; nowhere when nothing is said, or when it is switched off."""
    assert settings.endpoint(environ) == where


def test_the_share() -> None:
    """Absent, or a number from 0 to 1; anything else is refused and not guessed."""
    assert settings.ratio({}) is None
    assert settings.ratio({settings.RATIO: "0.25"}) == 0.25
    for wrong in ("1.5", "-1", "nan", "half"):
        with pytest.raises(ConfigError, match=settings.RATIO):
            settings.ratio({settings.RATIO: wrong})


async def _until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Polls what a thread counts."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a thread's numbers have no event
            await asyncio.sleep(0.01)
