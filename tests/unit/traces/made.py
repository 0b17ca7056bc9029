"""Traces as the proxy exports them, built from OTLP's messages: a READ, a WRITE, one retried, one failed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

MS = 1_000_000
GAP = 2_000
"""Nanoseconds between siblings."""
START = 1_700_000_000_000_000_000
PROXY, PREFILL, DECODE, KVD = "pdserve-proxy", "pdserve-prefill", "pdserve-decode", "pdserve-kvd"
HEAD = (("tokenize", PROXY, 0.4), ("admit", PROXY, 0.1), ("route", PROXY, 0.05))
READ = (
    ("prefill.hop", PROXY, 0.8),
    ("prefill.queue", PREFILL, 1.25),
    ("prefill.forward", PREFILL, 20.0),
    ("proxy.serialization", PROXY, 1.203),
    ("decode.admit", DECODE, 0.3),
    ("kv.wait", DECODE, 4.5),
    ("decode.queue", DECODE, 0.7),
    ("decode.first_step", DECODE, 6.0),
    ("detokenize", DECODE, 0.06),
    ("encode", PROXY, 0.5),
    ("egress", PROXY, 0.2),
)
WRITE = tuple(
    (name, service, {"proxy.serialization": 0.001, "kv.wait": 0.9}.get(name, ms)) for name, service, ms in READ
)


def value(of: Any) -> AnyValue:
    """A Python value as OTLP has it."""
    match of:
        case bool():
            return AnyValue(bool_value=of)
        case int():
            return AnyValue(int_value=of)
        case float():
            return AnyValue(double_value=of)
        case str():
            return AnyValue(string_value=of)
        case bytes():
            return AnyValue(bytes_value=of)
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=pairs(of)))
        case _:
            return AnyValue(array_value=ArrayValue(values=[value(item) for item in of]))


def pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [KeyValue(key=key, value=value(of)) for key, of in attributes.items()]


@dataclass
class Made:
    """A trace that grows span by span; span ids count from 1."""

    number: int
    start: int = START
    spans: dict[str, list[Span]] = field(default_factory=dict)
    count: int = 0

    @property
    def trace_id(self) -> bytes:
        return (0xABC0 << 112 | self.number).to_bytes(16, "big")

    @property
    def hex(self) -> str:
        return self.trace_id.hex()

    def span(
        self,
        name: str,
        service: str,
        begin: int,
        end: int,
        parent: Span | None = None,
        kind: int = 1,
        **attributes: Any,
    ) -> Span:
        """Adds one; times in nanoseconds since the trace's start, `__` in an attribute's name is a dot."""
        self.count += 1
        span = Span(
            trace_id=self.trace_id,
            span_id=(self.number << 32 | self.count).to_bytes(8, "big"),
            parent_span_id=parent.span_id if parent is not None else b"",
            name=f"pdserve.{name}",
            kind=Span.SpanKind.ValueType(kind + 0),
            start_time_unix_nano=self.start + begin,
            end_time_unix_nano=self.start + end,
            attributes=pairs({key.replace("__", "."): of for key, of in attributes.items()}),
        )
        self.spans.setdefault(service, []).append(span)
        return span

    def export(self) -> ExportTraceServiceRequest:
        """All of it in one Export."""
        return export(self)


def export(*traces: Made) -> ExportTraceServiceRequest:
    """Several traces in one Export, one resource a service."""
    groups: dict[str, list[Span]] = {}
    for made in traces:
        for service, spans in made.spans.items():
            groups.setdefault(service, []).extend(spans)
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(
                    attributes=pairs(
                        {"service.name": name, "service.instance.id": f"{name}-1", "service.version": "0.1"}
                    )
                ),
                scope_spans=[ScopeSpans(spans=spans)],
            )
            for name, spans in groups.items()
        ]
    )


def request(
    number: int = 1, mode: str = "read", start: int = START, *, retried: bool = False, stream_ms: float = 100.0
) -> Made:
    """A request that was answered, in READ or WRITE; `retried`: after an attempt that failed."""
    made = Made(number, start)
    chain = READ if mode == "read" else WRITE
    parts: dict[str, float] = {}
    root = made.span("request", PROXY, 0, 1, kind=2)
    at = 0
    for name, service, ms in HEAD:
        at = _part(made, name, service, at, ms, root, parts)
    if retried:
        lost = made.span("attempt", PROXY, at, at + 3 * MS - GAP, root, kind=3, error__type="PRODUCER_FAILED")
        lost.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="prefill gave up"))
        parts["retry"] = 3 * MS / 1e9
        at += 3 * MS
    first = at
    attempt = made.span("attempt", PROXY, first, first + 1, root, kind=3)
    drawn: dict[str, Span] = {}
    for name, service, ms in chain:
        begin, at = at, _part(made, name, service, at, ms, attempt, parts)
        drawn[name] = made.spans[service][-1]
        if name == "kv.wait":
            made.span("kvd.resolve", KVD, begin + GAP, begin + 100_000, drawn[name])
            copy = made.span("kvd.copy", KVD, begin + 102_000, at - 200_000, drawn[name], pdserve__kv__bytes=1 << 20)
            if mode == "write":
                push = made.span("kvd.push", KVD, begin - 9 * MS, begin - 4 * MS, drawn["prefill.forward"])
                copy.links.add(trace_id=push.trace_id, span_id=push.span_id)
    attempt.end_time_unix_nano = made.start + at
    ttft = at
    stream = made.span("decode.stream", DECODE, at + GAP, at + int(stream_ms * MS), root)
    stream.events.add(time_unix_nano=made.start + at + GAP, name="first_token", attributes=pairs({"index": 0}))
    e2e = at + int(stream_ms * MS) + GAP
    root.end_time_unix_nano = made.start + e2e
    root.attributes.extend(
        pairs(
            {
                "pdserve.request_id": f"cmpl-{number}",
                "pdserve.mode": mode,
                "pdserve.transport": "shm",
                "pdserve.fallbacks": int(retried),
                "pdserve.continuations": 0,
                "pdserve.kv.bytes": 1 << 20,
                "pdserve.ttft": ttft / 1e9,
                **{f"pdserve.ttft.{name}": seconds for name, seconds in parts.items()},
                "pdserve.ttft.unattributed": 0.0,
                "pdserve.ttft.rdma_wait": parts["kv.wait"],
                "pdserve.ttft.proxy_serialization": parts["proxy.serialization"],
                "pdserve.e2e": e2e / 1e9,
                "pdserve.outcome": "finished",
                "pdserve.formula.read": 0.0357,
                "gen_ai.request.model": "m",
                "gen_ai.response.finish_reasons": ["stop"],
                "gen_ai.usage.input_tokens": 64,
                "gen_ai.usage.output_tokens": 16,
            }
        )
    )
    return made


def failed(number: int = 1, start: int = START, cause: str = "no pair is left") -> Made:
    """A request that got an error before its first token."""
    made = Made(number, start)
    root = made.span(
        "request", PROXY, 0, 9 * MS, kind=2, pdserve__request_id=f"cmpl-{number}", pdserve__mode="read",
        pdserve__outcome="failed", error__type="NO_ENGINES", gen_ai__request__model="m",
    )  # fmt: skip
    attempt = made.span("attempt", PROXY, MS, 8 * MS, root, kind=3, error__type="PRODUCER_FAILED")
    for span, message in ((root, cause), (attempt, "prefill gave up")):
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=message))
    return made


def broken(number: int = 1, start: int = START) -> Made:
    """A READ that failed after 41 ms, 20 of them in kv.wait, which was not over; 1 ms is nobody's."""
    made, after = Made(number, start), {"tokenize": 1.0, "admit": 1.0, "prefill.forward": 18.0, "kv.wait": 20.0}
    said = {f"pdserve.failed_after.{name}": ms / 1000 for name, ms in after.items()}
    root = made.span(
        "request", PROXY, 0, 41 * MS, kind=2, pdserve__request_id=f"cmpl-{number}", pdserve__mode="read",
        pdserve__outcome="failed", error__type="PEER_LOST", gen_ai__request__model="m", pdserve__failed_in="kv.wait",
        pdserve__failed_after=0.041,
    )  # fmt: skip
    or_later = {"pdserve.failed_in.or_later": ["decode.queue"]}
    root.attributes.extend(pairs(said | or_later | {"pdserve.failed_after.unattributed": 0.001}))
    attempt = made.span("attempt", PROXY, 2 * MS, 41 * MS, root, kind=3, pdserve__failed_in="kv.wait")
    attempt.attributes.extend(pairs(or_later))
    made.span("prefill.forward", PREFILL, 3 * MS, 21 * MS - GAP, attempt)
    wait = made.span("kv.wait", DECODE, 21 * MS, 41 * MS, attempt, pdserve__failed_in__or_later=["decode.queue"])
    for span in (root, attempt, wait):
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="PEER_LOST: gone"))
    return made


def total(chain: Sequence[tuple[str, str, float]]) -> int:
    """Nanoseconds of the parts of a chain, with the head."""
    return sum(round(ms * MS) for _, _, ms in (*HEAD, *chain))


def _part(made: Made, name: str, service: str, at: int, ms: float, parent: Span, parts: dict[str, float]) -> int:
    end = at + round(ms * MS)
    if name.startswith(("prefill", "decode", "kv", "detok")) or end - at > GAP:
        made.span(name, service, at, max(end - GAP, at), parent)
    else:
        made.span(name, service, at, end, parent)
    parts[name] = (end - at) / 1e9
    return end
