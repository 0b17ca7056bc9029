"""Between spans and what the file's JSON columns hold of them. Pure."""

from typing import Any

import msgspec

from pdserve.traces.span import Event, Link, Origin, Span


class _Content(msgspec.Struct, array_like=True, frozen=True):
    """What of a span no column has."""

    message: str
    state: str
    attributes: dict[str, Any]
    events: tuple[Event, ...]
    links: tuple[Link, ...]


_DECODE = msgspec.json.Decoder(_Content).decode
_DECODE_ORIGIN = msgspec.json.Decoder(Origin).decode
_ENCODE = msgspec.json.Encoder(order="deterministic").encode


def span_content(span: Span) -> str:
    """The JSON column of a span."""
    return _ENCODE(_Content(span.message, span.state, span.tags, span.events, span.links)).decode()


def origin_content(origin: Origin) -> str:
    """The JSON column of an origin; equal origins have equal ones."""
    return _ENCODE(origin).decode()


def origin(content: str) -> Origin:
    """What `origin_content` was made of."""
    return _DECODE_ORIGIN(content)


def span(trace_id: str, row: tuple[Any, ...], origin: Origin) -> Span:
    """A span from (span_id, parent_id, name, kind, start_ns, end_ns, status, content)."""
    span_id, parent_id, name, kind, start_ns, end_ns, status, content = row
    more = _DECODE(content)
    return Span(
        trace_id, span_id, parent_id, name, origin, start_ns, end_ns, kind, status,
        more.message, more.state, more.attributes, more.events, more.links,
    )  # fmt: skip
