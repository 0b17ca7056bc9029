"""A collector in the test's process: OTLP's TraceService over a real loopback port, which keeps what it gets."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Kind, Link, Service, Span, SpanEvent, Status

_KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: Kind.INTERNAL,
    trace_pb2.Span.SPAN_KIND_SERVER: Kind.SERVER,
    trace_pb2.Span.SPAN_KIND_CLIENT: Kind.CLIENT,
}


@dataclass(frozen=True, slots=True)
class Received:
    """One span as it came over the wire, with its resource."""

    resource: dict[str, Any]
    span: Any

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the span."""
        return values(self.span.attributes)

    def value(self) -> Span:
        """As it was sent."""
        span = self.span
        return Span(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            service=Service(self.resource["service.name"], self.resource.get("service.instance.id", "")),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            kind=_KINDS[span.kind],
            attributes=self.attributes,
            events=tuple(SpanEvent(one.name, one.time_unix_nano, values(one.attributes)) for one in span.events),
            links=tuple(Link(one.trace_id.hex(), one.span_id.hex()) for one in span.links),
            status=Status(span.status.code == trace_pb2.Status.STATUS_CODE_ERROR, span.status.message),
            remote_parent=bool(span.flags & trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK),
        )


def values(pairs: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    return getattr(value, kind) if kind else None


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans until it is killed; `start` again brings it back at the same port."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.metadata: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        """Spans of each message."""
        self.silent = False
        """Takes calls and never answers."""
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serves."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """Open calls break off, new ones are refused."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Export(self, request: Any, context: Any) -> Any:
        """See TraceService."""
        if self.silent:
            await asyncio.Event().wait()
        self.metadata.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            said = values(resource.resource.attributes)
            self.spans += [Received(said, span) for scope in resource.scope_spans for span in scope.spans]
        self.sizes.append(len(self.spans) - sum(self.sizes))
        self._changed.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[Span]]:
        """What has come, as what was sent: spans by trace, each trace's root first."""
        found: dict[str, list[Span]] = {}
        for received in self.spans:
            span = received.value()
            found.setdefault(span.trace_id, []).append(span)
        for spans in found.values():
            spans.sort(key=lambda span: span.name != names.REQUEST)
        return found

    async def until(self, enough: Callable[[], bool], seconds: float = 15.0) -> None:
        """Waits until what has come is enough."""
        async with asyncio.timeout(seconds):
            while not enough():
                self._changed.clear()
                await self._changed.wait()
