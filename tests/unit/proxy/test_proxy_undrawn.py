"""A record of which no trace can be drawn is counted, wherever that shows, and said once in a while; the others are
drawn."""

import asyncio
import os
import signal
import socket

import pytest
from structlog.testing import capture_logs

from pdserve.proxy.ended import Ended
from pdserve.proxy.metrics import span_readings
from pdserve.proxy.testing import TraceSink
from pdserve.proxy.tracing.apart import Apart
from pdserve.proxy.tracing.child import Drawer
from pdserve.proxy.tracing.relief import Relieved
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.undrawn import SAID_EVERY_S, Undrawn
from pdserve.proxy.tracing.wire import LARGEST, Report, pack, unpack_report
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry import catalogue, names
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.span import Counts
from tests.unit.proxy.apart_rig import COMMAND, WHOLE, At, numbered
from tests.unit.proxy.records import OFFSET, record
from tests.unit.telemetry.collector import Collector
from tests.unit.telemetry.exposed import parse
from tests.waiting import until

UNTELLABLE = record(prompt_tokens=1 << 64)
"""No message takes its number."""


def undrawable() -> Ended:
    """A record that comes through as it is, and of which nothing can be drawn."""
    one = record(points={})
    assert pack(one, OFFSET)
    with pytest.raises(KeyError):
        spans_of(one, OFFSET)
    return one


class Stepped(Clock):
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.at = 1000.0

    def monotonic(self) -> float:
        """See Clock."""
        return self.at


def test_a_defect_of_every_request_is_said_once_in_a_while() -> None:
    """The first at once, with its ids and the defect; the next when some time has passed, with how many there were."""
    clock, error = Stepped(), ValueError("why")
    undrawn = Undrawn(clock)
    with capture_logs() as lines:
        for seconds in (0.0, 1.0, SAID_EVERY_S - 0.1, SAID_EVERY_S, SAID_EVERY_S + 1):
            clock.at = 1000.0 + seconds
            undrawn.add(error, request_id=f"r-{seconds:g}")
    assert undrawn.count == 5
    assert [(line["event"], line["log_level"], line["request_id"], line["undrawn"]) for line in lines] == [
        ("trace_failed", "error", "r-0", 1),
        ("trace_failed", "error", f"r-{SAID_EVERY_S:g}", 4),
    ]
    assert all(line["exc_info"] is error for line in lines)


async def test_the_process_that_draws_counts_what_it_cannot(collector: Collector) -> None:
    """Bytes that are no record, and a record that cannot be drawn: it is through with both, says so in its report and
    once in its log; the record between them arrives."""
    ours, proxys = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, proxys, capture_logs() as lines:
        for parcel in (b"no record", pack(record(), OFFSET), pack(undrawable(), OFFSET), pack(undrawable(), OFFSET)):
            proxys.send(parcel)
        proxys.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(Drawer(ours, collector.endpoint, 0.02).run(), 10)
        ours.shutdown(socket.SHUT_WR)
        said = Report()
        while parcel := proxys.recv(LARGEST):
            said = unpack_report(parcel)
    assert (said.drawn, said.undrawn, said.spans, said.exported) == (4, 3, WHOLE, WHOLE)
    assert len(collector.spans) == WHOLE
    assert [line["undrawn"] for line in lines if line["event"] == "trace_failed"] == [1]


async def test_the_proxy_counts_them_wherever_they_fail(collector: Collector) -> None:
    """One that cannot even be told to the process, and one that it cannot draw, in one number; a process that dies
    takes none of it along. The others are drawn."""
    async with Apart(COMMAND, At()) as apart:
        await until(lambda: apart.ready)
        with capture_logs() as lines:
            apart(UNTELLABLE)
            apart(UNTELLABLE)
        (line,) = lines
        assert (line["event"], line["request_id"], line["undrawn"]) == ("trace_failed", "r-1", 1)
        assert apart.counts == Counts(exported=0, dropped=0, failed=0, undrawn=2)
        apart(undrawable())
        apart(numbered(1))
        await until(lambda: apart.counts == Counts(exported=WHOLE, dropped=0, failed=0, undrawn=3))
        assert apart.unread == 0
        first = apart.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: apart.ready and apart.pid != first)
        assert apart.counts == Counts(exported=WHOLE, dropped=0, failed=0, undrawn=3)
        apart(undrawable())
        await until(lambda: apart.counts.undrawn == 4)


async def test_both_processes_count() -> None:
    """The one that is behind and the one that takes over."""
    relieved = Relieved(COMMAND, COMMAND, At())
    relieved.second = Apart(COMMAND, At())
    relieved.first(UNTELLABLE)
    relieved.second(UNTELLABLE)
    assert relieved.counts == Counts(exported=0, dropped=0, failed=0, undrawn=2)


def test_drawn_where_it_is_it_spoils_nothing() -> None:
    """In a simulation: one line for many, and the next one is drawn."""
    got: list[object] = []
    sink = TraceSink(got.append, At())
    with capture_logs() as lines:
        for _ in range(3):
            sink(undrawable())
        sink(record())
    assert [line["event"] for line in lines] == ["trace_failed"]
    assert got == [spans_of(record(), OFFSET)]


def test_it_is_a_metric_of_its_own() -> None:
    """From the start, since nobody knows how many spans are missing."""
    metrics = Metrics(names.PROXY, catalogue.PROXY)
    assert parse(metrics.expose()).of(catalogue.PROXY_UNDRAWN) == 0
    metrics.read(lambda: span_readings(Counts(exported=5, dropped=3, failed=2, undrawn=4)))
    assert parse(metrics.expose()).of(catalogue.PROXY_UNDRAWN) == 4
