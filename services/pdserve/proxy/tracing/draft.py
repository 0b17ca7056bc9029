"""A tree of spans on the proxy's monotonic clock, and how it becomes spans of a trace. Pure."""

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
    spans: list[Span] = []
    _draw(spans, root, root.window, trace_id, parent_id, offset_ns)
    spans[0] = replace(spans[0], remote_parent=bool(parent_id))
    if any(span.links for span in spans):
        drawn = {span.span_id for span in spans}
        for at, span in enumerate(spans):
            if span.links:
                spans[at] = replace(span, links=tuple(link for link in span.links if link.span_id in drawn))
    return spans


def _draw(spans: list[Span], draft: Draft, window: Window, trace_id: str, parent_id: str, offset_ns: int) -> None:
    # Runs for each span of each request: by position, and what most spans have not is not gone through.
    start_ns, end_ns = window.start_ns, window.end_ns
    spans.append(
        Span(
            trace_id,
            draft.span_id,
            parent_id,
            draft.name,
            draft.service,
            start_ns + offset_ns,
            end_ns + offset_ns,
            draft.kind,
            draft.attributes,
            tuple([replace(event, at_ns=min(max(event.at_ns, start_ns), end_ns) + offset_ns) for event in draft.events])
            if draft.events
            else (),
            tuple([Link(trace_id, span_id) for span_id in draft.links]) if draft.links else (),
            draft.status,
        )
    )
    if not draft.children:
        return
    for child, fitted in zip(draft.children, fit([child.window for child in draft.children], window), strict=True):
        if fitted is not None:
            _draw(spans, child, fitted, trace_id, draft.span_id, offset_ns)
