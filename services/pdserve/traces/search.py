"""What may be asked of the store, and whether a span is meant by it. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.rpc.errors import InvalidRequest
from pdserve.traces.span import ERROR, KINDS, OK, Span

_UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PIECE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


@dataclass(frozen=True, slots=True)
class Search:
    """Traces that have a span for which all of this holds."""

    start_ns: int
    """Earliest start."""
    end_ns: int
    """Latest start."""
    service: str = ""
    operation: str = ""
    """Name of the span."""
    min_ns: int = 0
    """Shortest duration."""
    max_ns: int = (1 << 63) - 1
    """Longest duration."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the span, of its events or of its resource, as text."""
    limit: int = 20
    """Most traces, the newest first."""


def duration(text: str) -> int:
    """Nanoseconds of a duration as Jaeger writes it: `1.5s`, `100ms`, `1h2m`.

    Raises:
        InvalidRequest: it is none.
    """
    pieces = _PIECE.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise InvalidRequest(f"{text!r} is not a duration, as 1.5s or 100ms")
    return sum(round(float(number) * _UNIT_NS[unit]) for number, unit in pieces)


def has_tags(span: Span, tags: Mapping[str, str]) -> bool:
    """Whether the span, one of its events or its resource says each of them."""
    return all(
        any(_text(one[key]) == value for one in (derived(span), span.tags, *_events(span), span.origin.resource)
            if key in one)
        for key, value in tags.items()
    )  # fmt: skip


def derived(span: Span) -> dict[str, Any]:
    """What Jaeger shows as tags although OTLP has it elsewhere."""
    tags: dict[str, Any] = {}
    if span.origin.scope:
        tags["otel.scope.name"] = span.origin.scope
    if span.origin.version:
        tags["otel.scope.version"] = span.origin.version
    if span.kind:
        tags["span.kind"] = KINDS[span.kind]
    if span.status == ERROR:
        tags["error"] = True
        tags["otel.status_code"] = "ERROR"
        if span.message:
            tags["otel.status_description"] = span.message
    elif span.status == OK:
        tags["otel.status_code"] = "OK"
    if span.state:
        tags["w3c.tracestate"] = span.state
    return tags


def _events(span: Span) -> list[dict[str, Any]]:
    return [{"event": event.name, **event.attributes} for event in span.events]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
