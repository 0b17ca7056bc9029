"""Spans as OTLP's messages: what the SDK would make of the same spans, and what it would not take."""

import dataclasses

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status as SdkStatus
from opentelemetry.trace.status import StatusCode

from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.types import Mode
from pdserve.runtime.telemetry.otlp import Batch
from pdserve.runtime.telemetry.span import Kind, Link, Service, Span, SpanEvent, Status, Value
from tests.unit.proxy.records import record
from tests.unit.telemetry.collector import values

TRACE = "0af7651916cd43dd8448eb211c80319c"
OFFSET = 1_700_000_000_000_000_000
WHOLE = Span(
    trace_id=TRACE,
    span_id="b7ad6b7169203331",
    parent_id="00f067aa0ba902b7",
    name="pdserve.attempt",
    service=Service("pdserve-decode", "engine-1"),
    start_ns=OFFSET + 1,
    end_ns=OFFSET + 777,
    kind=Kind.CLIENT,
    attributes={"text": "ä", "truth": True, "lie": False, "count": -3, "seconds": 0.25, "many": ("x", "y"), "no": ()},
    events=(SpanEvent("first_token", OFFSET + 100, {"at": 1}), SpanEvent("bare", OFFSET)),
    links=(Link(TRACE, "00f067aa0ba902b8"),),
    status=Status(True, "ENGINE_DIED: gone"),
    remote_parent=True,
)
BARE = Span(TRACE, "00000000000000ff", "", "pdserve.request", Service("pdserve-proxy"), 1_000, 2_000)


def by_the_sdk(spans: list[Span], batch: Batch) -> ExportTraceServiceRequest:
    """The same spans through the SDK's own objects and encoder, below the resources that the batch has."""
    groups = {}
    for group in batch.request.resource_spans:
        said = values(group.resource.attributes)
        service = Service(said["service.name"], said.get("service.instance.id", ""))
        groups[service] = (Resource(said), group.scope_spans[0].scope.version)

    def context(span_id: str, *, remote: bool = False) -> SpanContext:
        return SpanContext(int(TRACE, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

    kinds = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
    return encode_spans(
        [
            ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(span.parent_id, remote=span.remote_parent) if span.parent_id else None,
                resource=groups[span.service][0],
                attributes=span.attributes,
                events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
                links=[SdkLink(context(link.span_id)) for link in span.links],
                kind=kinds[span.kind],
                status=SdkStatus(StatusCode.ERROR, span.status.message) if span.status.failed else SdkStatus(),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=InstrumentationScope("pdserve", groups[span.service][1]),
            )
            for span in spans
        ]
    )


@pytest.mark.parametrize("trace", ["READ", "WRITE", "by hand"])
def test_it_is_what_the_sdk_would_send(trace: str) -> None:
    """Field by field, for a whole READ, a whole WRITE, and a span that has everything beside one that has nothing. But
    for the status of what went well: the SDK sends an empty one, we none, which means the same."""
    spans = [WHOLE, BARE]
    if trace != "by hand":
        spans = spans_of(record(Mode[trace]), OFFSET)
    batch = Batch()
    batch.add(spans)
    theirs = by_the_sdk(spans, batch)
    for group in theirs.resource_spans:
        for span in group.scope_spans[0].spans:
            if not span.status.code:
                span.ClearField("status")
    assert batch.request == theirs
    assert len(batch) == len(spans)


def test_a_service_is_named_once() -> None:
    """However many traces and spans of it there are in a message, in the order in which they came."""
    batch = Batch()
    for number in range(3):
        batch.add([dataclasses.replace(BARE, span_id=f"{number:016x}"), WHOLE])
    assert [values(group.resource.attributes)["service.name"] for group in batch.request.resource_spans] == [
        "pdserve-proxy",
        "pdserve-decode",
    ]
    (scope,) = batch.request.resource_spans[0].scope_spans
    assert [span.span_id.hex() for span in scope.spans] == [f"{number:016x}" for number in range(3)]


def test_another_engine_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's detectors take milliseconds, and a fleet may have more engines than are remembered: they run once."""
    batch = Batch()
    batch.add([BARE])
    monkeypatch.setattr(Resource, "create", lambda _: pytest.fail("asked again"))
    for number in range(300):
        batch.add([dataclasses.replace(BARE, service=Service("pdserve-decode", f"new-{number}"))])
    last = values(batch.request.resource_spans[-1].resource.attributes)
    assert (last["service.name"], last["service.instance.id"]) == ("pdserve-decode", "new-299")
    assert last["telemetry.sdk.name"]


def test_what_otlp_cannot_hold_is_said_as_text() -> None:
    """A client's seed of more than 64 bits, and half a surrogate pair in its words: neither loses the trace."""
    attributes: dict[str, Value] = {"seed": 2**70, "low": -(2**63), "model": "m\ud800", "many": ("a", "\udfff")}
    batch = Batch()
    batch.add([dataclasses.replace(BARE, attributes=attributes, status=Status(True, "no such model: \ud800"))])
    (span,) = (
        ExportTraceServiceRequest.FromString(batch.request.SerializeToString()).resource_spans[0].scope_spans[0].spans
    )
    assert values(span.attributes) == {
        "seed": str(2**70),
        "low": -(2**63),
        "model": "m\\ud800",
        "many": ("a", "\\udfff"),
    }
    assert span.status.message == "no such model: \\ud800"
