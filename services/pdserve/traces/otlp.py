"""OTLP's protobuf to spans; what breaks OTLP's rules is counted and named, never stored."""

import base64
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from pdserve.traces.span import BYTES, KINDS, Attributes, Event, Link, Origin, Span

MAX_SPAN_BYTES = 64 << 10
"""Of one span on the wire."""
MAX_ORIGIN_BYTES = 64 << 10
"""Of a resource or a scope on the wire: each of its spans shares it."""
NAMELESS = "OTLPResourceNoServiceName"
"""What Jaeger calls a service that has not said its name."""
_LATEST = (1 << 63) - 1
"""Nanoseconds that a signed number holds: the year 2262."""


class _Refused(ValueError):
    """Why a span cannot be stored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one Export held."""

    spans: tuple[Span, ...]
    refused: Counter[str]
    """How many spans were not taken, by reason."""


def decode(request: ExportTraceServiceRequest) -> Batch:
    """All spans of an Export that can be stored."""
    spans: list[Span] = []
    refused: Counter[str] = Counter()
    for group in request.resource_spans:
        large = group.resource.ByteSize() > MAX_ORIGIN_BYTES
        for scoped in group.scope_spans:
            if large or scoped.scope.ByteSize() > MAX_ORIGIN_BYTES:
                refused[f"resource or scope of more than {MAX_ORIGIN_BYTES} bytes"] += len(scoped.spans)
                continue
            origin = _origin(group.resource, scoped.scope)
            for span in scoped.spans:
                try:
                    spans.append(_span(span, origin))
                except _Refused as error:
                    refused[str(error)] += 1
    return Batch(tuple(spans), refused)


def why(refused: Counter[str]) -> str:
    """The reasons in one line, as a partial success says them."""
    return "; ".join(f"{count}: {reason}" for reason, count in refused.most_common())


def _span(span: trace_pb2.Span, origin: Origin) -> Span:
    if span.ByteSize() > MAX_SPAN_BYTES:
        raise _Refused(f"span of more than {MAX_SPAN_BYTES} bytes")
    parent = span.parent_span_id
    if parent and len(parent) != 8:
        raise _Refused("parent_span_id is not 8 bytes")
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
        raise _Refused("span has no start, or ends before it")
    if span.end_time_unix_nano > _LATEST:
        raise _Refused("span ends after the year 2262")
    return Span(
        trace_id=_id(span.trace_id, 16, "trace_id"),
        span_id=_id(span.span_id, 8, "span_id"),
        parent_id=parent.hex() if any(parent) else "",
        name=span.name,
        origin=origin,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind if span.kind < len(KINDS) else 0,
        status=span.status.code if span.status.code in (1, 2) else 0,
        message=span.status.message,
        state=span.trace_state,
        attributes=_attributes(span.attributes),
        events=tuple(
            Event(min(event.time_unix_nano, _LATEST), event.name, _attributes(event.attributes))
            for event in span.events
        ),
        links=tuple(
            Link(_id(link.trace_id, 16, "a link's trace_id"), _id(link.span_id, 8, "a link's span_id"),
                 _attributes(link.attributes))
            for link in span.links
        ),
    )  # fmt: skip


def _origin(resource: Resource, scope: InstrumentationScope) -> Origin:
    attributes = _attributes(resource.attributes)
    service, instance = attributes.get("service.name"), attributes.get("service.instance.id", "")
    return Origin(str(service or NAMELESS), str(instance), attributes, scope.name, scope.version)


def _id(value: bytes, size: int, name: str) -> str:
    if len(value) != size or not any(value):
        raise _Refused(f"{name} is not {size} bytes, or all zero")
    return value.hex()


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            number = value.double_value
            return number if math.isfinite(number) else str(number)
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return {BYTES: base64.b64encode(value.bytes_value).decode()}
        case _:
            return None
