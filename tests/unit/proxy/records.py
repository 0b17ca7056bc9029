"""Requests as records, for tests of what becomes of them: one that ended well in each mode, and what holds of every
trace."""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.proxy import parts
from pdserve.proxy.course import Course
from pdserve.proxy.ended import Ended, Outcome, Tried
from pdserve.proxy.parts import Point
from pdserve.proxy.trace import TraceContext
from pdserve.proxy.tracing.layout import GAP_NS, SHORTEST_NS
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.types import Finished, Mode, Sampling, Timings, TransferFacts, Usage
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Span

GOLDEN = Path(__file__).parent / "golden"
"""Whole traces. PDSERVE_UPDATE_GOLDEN=1 writes them anew; read the difference before it is committed."""
MS = 1_000_000
OFFSET = 1_700_000_000_000_000_000
TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7", True)

HEAD: dict[int, int] = {Point.RECEIVED: 0, Point.TOKENIZED: 1 * MS, Point.ADMITTED: 3 * MS, Point.ROUTED: 4 * MS}
LEGS: dict[Mode, dict[int, int]] = {
    Mode.READ: {
        Point.PREFILL_RECEIVED: 5 * MS,
        Point.PREFILL_SCHEDULED: 15 * MS,
        Point.PREFILL_FORWARD_END: 55 * MS,
        Point.DECODE_RECEIVED: 58 * MS,
        Point.DECODE_BLOCKS_RESERVED: 60 * MS,
        Point.KV_LANDED: 80 * MS,
        Point.DECODE_SCHEDULED: 82 * MS,
        Point.FIRST_TOKEN_SAMPLED: 92 * MS,
        Point.DETOKENIZED: 93 * MS,
        Point.TOKEN_RECEIVED: 95 * MS,
    },
    Mode.WRITE: {
        Point.DECODE_RECEIVED: 5 * MS,
        Point.PREFILL_RECEIVED: 6 * MS,
        Point.DECODE_BLOCKS_RESERVED: 9 * MS,
        Point.PREFILL_SCHEDULED: 16 * MS,
        Point.PREFILL_FORWARD_END: 56 * MS,
        Point.KV_LANDED: 60 * MS,
        Point.DECODE_SCHEDULED: 62 * MS,
        Point.FIRST_TOKEN_SAMPLED: 72 * MS,
        Point.DETOKENIZED: 73 * MS,
        Point.TOKEN_RECEIVED: 75 * MS,
    },
}
FACTS = {
    Mode.READ: TransferFacts(
        *(8192, 4, 2, 1, 10 * MS, "shm"), first_post_ns=65 * MS, landed_ns=80 * MS, overlapped_bytes=0,
        offered_ns=55 * MS, accepted_ns=60 * MS, last_byte_ns=79 * MS,
    ),
    Mode.WRITE: TransferFacts(
        *(8192, 4, 2, 1, 10 * MS, "shm"), first_post_ns=20 * MS, landed_ns=60 * MS, overlapped_bytes=6144,
        offered_ns=56 * MS, accepted_ns=9 * MS, last_byte_ns=59 * MS,
    ),
}  # fmt: skip


def record(mode: Mode = Mode.READ, **changes: Any) -> Ended:
    """A request of one attempt that ended well; its first byte follows the token by 1 ms, four tokens within 30 ms."""
    legs = LEGS[mode]
    first = legs[Point.TOKEN_RECEIVED] + 1 * MS
    course = Course(3 * MS, 4 * MS, first, first + 30 * MS, first + 31 * MS, legs, facts=FACTS[mode])
    tried = Tried("prefill-1", "decode-1", "ab" * 16, mode, 4, course=course)
    points: Mapping[int, int] = HEAD | legs | {Point.FIRST_BYTE_WRITTEN: first}
    timings = parts.split(points, parts.chain(handed_over=True, retried=False), first + 32 * MS, mode)
    fields: dict[str, Any] = {
        "request_id": "r-1",
        "trace": TRACE,
        "model": "m",
        "chat": True,
        "sampling": Sampling(max_tokens=4, temperature=0.5, top_p=0.9, top_k=20, seed=7, n=2, presence_penalty=0.1),
        "outcome": Outcome.FINISHED,
        "reason": "",
        "error": "",
        "prompt_tokens": 60,
        "completion_tokens": 4,
        "fallbacks": 0,
        "continuations": 0,
        "attempts": (tried,),
        "finished": finished(timings, mode),
        "finish_reasons": ("length", "stop"),
        "points": points,
        "ended_ns": first + 32 * MS,
    }
    return Ended(**(fields | changes))


def finished(timings: Timings, mode: Mode) -> Finished:
    """What the client was told."""
    return Finished(Usage(60, 16, 4), timings, FACTS[mode], mode, 0, 0, 0, "prefill-1", "decode-1")


def drawn(record: Ended) -> list[Span]:
    """Its spans, checked for what holds of every trace."""
    spans = spans_of(record, OFFSET)
    check(spans, record)
    return spans


def check(spans: list[Span], record: Ended) -> None:
    """One root, unique ids, known names, children inside their parents, siblings 2 us apart, links to spans that are
    there, and parts that sum to TTFT to the nanosecond."""
    root, by_id = spans[0], {span.span_id: span for span in spans}
    assert (root.name, root.span_id, root.parent_id) == (names.REQUEST, TRACE.span_id, TRACE.parent_id)
    assert len(by_id) == len(spans)
    assert {span.name for span in spans} <= names.SPANS
    for span in spans:
        assert span.end_ns - span.start_ns >= SHORTEST_NS
        assert all(link.span_id in by_id for link in span.links)
        assert all(span.start_ns <= event.at_ns <= span.end_ns for event in span.events)
    below: dict[str, list[Span]] = {}
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent.start_ns <= span.start_ns
        assert span.end_ns <= parent.end_ns
        below.setdefault(span.parent_id, []).append(span)
    for siblings in below.values():
        for earlier, later in itertools.pairwise(siblings):
            assert later.start_ns - earlier.end_ns >= GAP_NS
    if names.TTFT in root.attributes:
        explained = [value for name, value in root.attributes.items() if _is_part(name)]
        ttft = record.points[Point.FIRST_BYTE_WRITTEN] - record.points[Point.RECEIVED]
        assert sum(round(float(str(value)) * 1e9) for value in explained) == ttft
    if names.FAILED_AFTER in root.attributes:
        assert names.TTFT not in root.attributes
        explained = [value for name, value in root.attributes.items() if name.startswith("pdserve.failed_after.")]
        after = record.ended_ns - record.points[Point.RECEIVED]
        assert sum(round(float(str(value)) * 1e9) for value in explained) == after


def compare(record: Ended, golden: str) -> list[Span]:
    """Its spans, which are those of the golden file, and nothing else: names, services, ids, times, attributes, events,
    links, status."""
    spans = drawn(record)
    lines = [_line(span) for span in spans]
    path = GOLDEN / f"{golden}.json"
    if os.environ.get("PDSERVE_UPDATE_GOLDEN"):
        path.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")
    assert json.loads(json.dumps(lines)) == json.loads(path.read_text())
    return spans


def _is_part(name: str) -> bool:
    part = name.removeprefix("pdserve.ttft.")
    return part != name and part not in ("rdma_wait", "proxy_serialization")


def _line(span: Span) -> dict[str, Any]:
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "kind": span.kind.value,
        "service": span.service.name,
        "instance": span.service.instance_id,
        "from_us": (span.start_ns - OFFSET) / 1000,
        "to_us": (span.end_ns - OFFSET) / 1000,
        "attributes": dict(span.attributes),
        "events": [event.name for event in span.events],
        "links": [link.span_id for link in span.links],
        "failed": span.status.failed,
    } | ({"message": span.status.message} if span.status.failed else {})
