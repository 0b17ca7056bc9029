"""Spans as OTLP's messages: each span is written straight into the message that will be sent.

What the SDK would send for the same spans, without its objects in between: those cost several times as much as the
message (docs/decisions/0010-trace-encoding.md). No I/O.
"""

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource

from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Kind, Service, Span, Value

_VERSION: Final = importlib.metadata.version("pdserve")
_KINDS: Final = {
    Kind.INTERNAL: trace_pb2.Span.SPAN_KIND_INTERNAL,
    Kind.SERVER: trace_pb2.Span.SPAN_KIND_SERVER,
    Kind.CLIENT: trace_pb2.Span.SPAN_KIND_CLIENT,
}
_LOCAL: Final = int(trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_REMOTE: Final = _LOCAL | int(trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
_SCOPE: Final = common_pb2.InstrumentationScope(name="pdserve", version=_VERSION)


class Batch:
    """Spans of whole traces in one message, by service. Not safe for two threads at once."""

    __slots__ = ("_scopes", "_size", "request")

    def __init__(self) -> None:
        self.request = ExportTraceServiceRequest()
        self._scopes: dict[Service, trace_pb2.ScopeSpans] = {}
        self._size = 0

    def __len__(self) -> int:
        """Spans."""
        return self._size

    def add(self, spans: Sequence[Span]) -> None:
        """Writes the spans of one trace behind what is there. An attribute that OTLP cannot hold is said as text."""
        for span in spans:
            scope = self._scopes.get(span.service) or self._scope(span.service)
            _write(span, scope)
            self._size += 1

    def _scope(self, service: Service) -> trace_pb2.ScopeSpans:
        group = self.request.resource_spans.add(resource=_resource(service))
        scope = self._scopes[service] = group.scope_spans.add(scope=_SCOPE)
        return scope


def _write(span: Span, scope: trace_pb2.ScopeSpans) -> None:
    # Field by field: to make a message of messages or of named arguments takes longer.
    said = scope.spans.add()
    said.trace_id = bytes.fromhex(span.trace_id)
    said.span_id = bytes.fromhex(span.span_id)
    if span.parent_id:
        said.parent_span_id = bytes.fromhex(span.parent_id)
    said.name = span.name
    said.kind = _KINDS[span.kind]
    said.start_time_unix_nano = span.start_ns
    said.end_time_unix_nano = span.end_ns
    said.flags = _REMOTE if span.remote_parent else _LOCAL
    if span.status.failed:
        said.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        said.status.message = _text(span.status.message)
    _attributes(span.attributes, said)
    for event in span.events:
        _attributes(event.attributes, said.events.add(name=event.name, time_unix_nano=event.at_ns))
    for link in span.links:
        said.links.add(trace_id=bytes.fromhex(link.trace_id), span_id=bytes.fromhex(link.span_id), flags=_LOCAL)


def _attributes(
    attributes: Mapping[str, Value], said: "trace_pb2.Span | trace_pb2.Span.Event | resource_pb2.Resource"
) -> None:
    add = said.attributes.add
    for key, value in attributes.items():
        into = add(key=key).value
        kind = type(value)
        if kind is float:
            into.double_value = value  # type: ignore[assignment]  # mypy does not narrow by `kind`
        elif kind is bool:
            into.bool_value = value  # type: ignore[assignment]
        else:
            _set(into, value)


def _set(into: common_pb2.AnyValue, value: Value) -> None:
    try:
        if isinstance(value, str):
            into.string_value = value
        elif isinstance(value, int):
            into.int_value = value
        elif isinstance(value, float):
            into.double_value = value
        else:
            into.array_value.SetInParent()
            for item in value:
                _set(into.array_value.values.add(), item)
    except ValueError:  # half a surrogate pair, or more than 64 bits
        into.string_value = _text(str(value))


def _text(said: str) -> str:
    """What UTF-8 has no bytes for is escaped: a client's words may hold it."""
    return said.encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(maxsize=256)
def _resource(service: Service) -> resource_pb2.Resource:
    """With what OTEL_RESOURCE_ATTRIBUTES says, as the SDK has it."""
    said = {names.SERVICE_NAME: service.name, names.SERVICE_VERSION: _VERSION}
    if service.instance_id:
        said[names.SERVICE_INSTANCE] = service.instance_id
    made = resource_pb2.Resource()
    _attributes(_of_all() | said, made)
    return made


@functools.cache
def _of_all() -> dict[str, Value]:
    """What all services' resources have. Asked once: the SDK's detectors take milliseconds, on the loop."""
    attributes: dict[str, Value] = dict(Resource.create({}).attributes)  # type: ignore[arg-type]  # it allows more than it makes
    attributes.pop(names.SERVICE_INSTANCE, None)  # made up by the SDK, of this process, which it need not be
    return attributes
