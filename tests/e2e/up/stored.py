"""Traces as a deployment's own store tells them to anybody, put back into the values that its proxy had sent."""

import time
from fractions import Fraction
from typing import Any

import pytest

from pdserve.cli.trace import TraceStore
from pdserve.client import Completion
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Link, Service, Span, Status
from tests.unit.telemetry.trace import HANDED_OVER, Trace

OFF_NS = 250
"""Two times of a trace, each a float of microseconds since the epoch, may be this much off against each other."""
AT_ONCE_S = 0.005
"""An answer that ends so soon after its first token may have come in one piece."""
ARRIVE_S = 15.0
"""Longest way of a trace from the end of its request into the store."""


def arrived(store: TraceStore, trace_id: str) -> tuple[Trace, dict[str, Any]]:
    """The trace, once its last span is there, and the store's row of its request."""
    deadline = time.monotonic() + ARRIVE_S
    while True:
        rows = store.requests(limit=2, id=trace_id)
        if rows:
            said = store.get(f"trace/{trace_id}", "spans")
            if _whole(said):
                assert rows == [said["request"]]
                spans = sorted(
                    (_span(trace_id, span) for span in said["spans"]), key=lambda span: span.name != names.REQUEST
                )
                return Trace(spans), rows[0]
        assert time.monotonic() < deadline, f"{trace_id} is not whole after {ARRIVE_S} s: {rows}"
        time.sleep(0.05)


def _whole(said: dict[str, Any]) -> bool:
    drawn = {span["name"] for span in said["spans"]}
    # Where all tokens come with the first, as they may on a busy machine, there is no stream to draw.
    at_once = said["request"]["e2e"] - said["request"]["ttft"] < AT_ONCE_S
    return names.STREAM in drawn or (at_once and names.part_span("egress") in drawn)


def explained(store: TraceStore, answer: Completion, mode: str) -> None:
    """The store's trace of an answer that was handed over is whole, leaves at most max(1 ms, 1 %) of its TTFT
    unexplained, and says, as the store's row of it does, what the client was told."""
    trace, row = arrived(store, answer.trace_id)
    trace.check(OFF_NS)
    parts, ttft = trace.parts(), trace.figure(names.TTFT)
    assert trace.figure(names.UNATTRIBUTED) <= max(0.001, 0.01 * ttft), parts
    assert tuple(parts) == HANDED_OVER
    assert parts == row["parts"] == pytest.approx(answer.timings.parts, abs=1e-9)
    assert ttft == row["ttft"] == pytest.approx(answer.timings.ttft_seconds, abs=1e-9)
    for part, seconds in parts.items():
        drawn = trace.named(names.part_span(part))
        assert len(drawn) == (1 if seconds > 4e-6 else len(drawn)) <= 1, (part, seconds)
        if drawn:
            assert (drawn[0].end_ns - drawn[0].start_ns) / 1e9 == pytest.approx(seconds, abs=5e-6)
    root = trace.root.attributes
    assert (root[names.MODE], root[names.TRANSPORT], root[names.OUTCOME]) == (mode, "shm", "finished")
    assert root[names.KV_BYTES] == row["kv_bytes"] == answer.kv_bytes
    assert {span.service.name for span in trace.spans} >= {names.PROXY, names.PREFILL, names.DECODE}


def _span(trace_id: str, said: dict[str, Any]) -> Span:
    start, duration = _ns(said["start_us"]), _ns(said["duration_us"])
    return Span(
        trace_id=trace_id,
        span_id=said["span_id"],
        parent_id=said["parent_id"],
        name=said["name"],
        service=Service(said["service"], said["instance"]),
        start_ns=start,
        end_ns=start + duration,
        attributes=said["attributes"],
        links=tuple(Link(link["trace_id"], link["span_id"]) for link in said["links"]),
        status=Status(said["status"] == "error", said["status_message"]),
    )


def _ns(microseconds: float) -> int:
    return round(Fraction(microseconds) * 1000)
