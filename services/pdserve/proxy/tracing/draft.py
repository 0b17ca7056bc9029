"""A tree of spans on the proxy's monotonic clock, and how it becomes spans of a trace. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdserve.proxy.tracing.layout import Window, fit
from pdserve.runtime.telemetry.span import WELL, Kind, Link, Service, Span, SpanEvent, Status, Value


@dataclass(slots=True)
class Draft:
    """A span that is being put together."""

    span_id: str
    name: str
    service: Service
    window: Window
    kind: Kind = Kind.INTERNAL
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    """Monotonic."""
    links: list[str] = field(default_factory=list)
    """Spans of the same trace."""
    status: Status = WELL
    children: "list[Draft]" = field(default_factory=list)
    """In the order of their starts; they do not overlap."""


def render(root: Draft, trace_id: str, parent_id: str, offset_ns: int) -> list[Span]:
    """The root first. `offset_ns` makes monotonic times epoch times. A link to what was too short to be
    drawn is left out."""
    spans = list(_spans(root, root.window, trace_id, parent_id, offset_ns))
    drawn = {span.span_id for span in spans}
    spans[0] = replace(spans[0], remote_parent=bool(parent_id))
    return [replace(s, links=tuple(k for k in s.links if k.span_id in drawn)) if s.links else s for s in spans]


def _spans(draft: Draft, window: Window, trace_id: str, parent_id: str, offset_ns: int) -> Iterator[Span]:
    yield Span(
        trace_id=trace_id,
        span_id=draft.span_id,
        parent_id=parent_id,
        name=draft.name,
        service=draft.service,
        start_ns=window.start_ns + offset_ns,
        end_ns=window.end_ns + offset_ns,
        kind=draft.kind,
        attributes=draft.attributes,
        events=tuple(
            replace(event, at_ns=min(max(event.at_ns, window.start_ns), window.end_ns) + offset_ns)
            for event in draft.events
        ),
        links=tuple(Link(trace_id, span_id) for span_id in draft.links),
        status=draft.status,
    )
    for child, fitted in zip(draft.children, fit([child.window for child in draft.children], window), strict=True):
        if fitted is not None:
            yield from _spans(child, fitted, trace_id, draft.span_id, offset_ns)
