"""OTLP/gRPC's TraceService: spans in, what was not taken said honestly, and never more at once than fits."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer

from pdserve.rpc.errors import Overloaded
from pdserve.traces import otlp
from pdserve.traces.store import Store

log = structlog.get_logger(__name__)

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_CALLS = 32
"""Exports that gRPC reads at once; it refuses more itself with RESOURCE_EXHAUSTED."""
_WAITING = 4
"""As many of the largest exports may wait to be stored."""


class Receiver(TraceServiceServicer):
    """Takes Exports. An export that is larger than `max_bytes` does not get here: gRPC refuses it."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store = store
        self._room = _WAITING * max_bytes
        self._pending = 0
        self.stored = 0
        """Spans since the start."""
        self.refused: Counter[str] = Counter()
        """Spans that were not taken, by reason."""

    async def Export(
        self, request: ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportTraceServiceResponse:
        """Returns when the spans are in the file.

        Raises:
            Overloaded: too much is waiting to be stored.
            Unavailable, DeadlinePassed: Store.add.
        """
        size = request.ByteSize()
        if self._pending + size > self._room:
            raise Overloaded(f"{self._pending} bytes of spans wait to be stored, no more than {self._room} may")
        self._pending += size
        try:
            batch = await asyncio.to_thread(otlp.decode, request)
            refused = batch.refused + await self._store.add(batch.spans)
        finally:
            self._pending -= size
        lost = refused.total()
        self.stored += len(batch.spans) + batch.refused.total() - lost
        if not lost:
            return ExportTraceServiceResponse()
        said = otlp.why(refused)
        if any(reason not in self.refused for reason in refused):  # each kind of fault is logged once
            log.warning("spans_refused", why=said)
        self.refused += refused
        return ExportTraceServiceResponse(
            partial_success=ExportTracePartialSuccess(rejected_spans=lost, error_message=said)
        )
