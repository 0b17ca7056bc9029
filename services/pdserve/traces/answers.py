"""Requests and spans in the shapes of our own API. Pure."""

from collections.abc import Sequence
from typing import Any

from pdserve.traces import critical
from pdserve.traces.requests import Request
from pdserve.traces.span import ERROR, KINDS, OK, Span

Json = dict[str, Any]
_STATUS = {OK: "ok", ERROR: "error"}


def request(row: Request) -> Json:
    """One request."""
    return {
        "trace_id": row.trace_id,
        "request_id": row.request_id,
        "start_us": row.start_ns / 1000,
        "ttft": row.ttft,
        "e2e": row.e2e,
        "mode": row.mode,
        "transport": row.transport,
        "model": row.model,
        "outcome": row.outcome,
        "reason": row.reason,
        "fallbacks": row.fallbacks,
        "continuations": row.continuations,
        "input_tokens": row.input_tokens,
        "output_tokens": row.output_tokens,
        "kv_bytes": row.kv_bytes,
        "parts": row.parts,
        "unattributed": row.unattributed,
        "failed_after": row.failed_after,
        "failed_in": row.failed_in,
        "failed_or_later": row.failed_or_later,
    }


def trace(trace_id: str, requests: Sequence[Request], spans: Sequence[Span]) -> Json:
    """One trace with the first of these requests; `request` is null in a trace of others."""
    path = {section.span_id for section in critical.path(spans)}
    return {
        "trace_id": trace_id,
        "request": request(requests[0]) if requests else None,
        "spans": [_span(span, critical=span.span_id in path) for span in spans],
    }


def _span(span: Span, *, critical: bool) -> Json:
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "service": span.origin.service,
        "instance": span.origin.instance,
        "kind": KINDS[span.kind],
        "start_us": span.start_ns / 1000,
        "duration_us": (span.end_ns - span.start_ns) / 1000,
        "status": _STATUS.get(span.status, "unset"),
        "status_message": span.message,
        "attributes": span.tags,
        "events": [
            {"name": event.name, "time_us": event.time_ns / 1000, "attributes": event.attributes}
            for event in span.events
        ],
        "links": [
            {"trace_id": link.trace_id, "span_id": link.span_id, "attributes": link.attributes} for link in span.links
        ],
        "critical": critical,
    }
