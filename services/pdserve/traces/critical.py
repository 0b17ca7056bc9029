"""The critical path of a trace, as Jaeger's page draws it. Pure; whole microseconds.

    root   |=====......=====|            = on the path
    child       |======|   |-|           the child that ends last before what follows it, and so on back
                                         to the start; a sibling counts only if it ends strictly before.

Jaeger first cuts children to their parents: what lies outside is left out, what overlaps is cut. Only
parents count, links do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.traces.span import Span


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of one span that nothing else could have shortened."""

    span_id: str
    start_us: int
    end_us: int


@dataclass(slots=True)
class _Cut:
    """A span within its parent."""

    span_id: str
    parent: "_Cut | None"
    start: int
    end: int
    children: list["_Cut"] = field(default_factory=list)


def path(spans: Sequence[Span]) -> list[Section]:
    """The sections of the critical path, last first; nothing where no span is a root."""
    root = _tree(spans)
    found: list[Section] = []
    current, until = root, root.end if root else 0
    before: int | None = None
    while current is not None:
        child = _last(current, before)
        section = Section(current.span_id, child.end if child else current.start, until)
        if section.start_us != section.end_us:
            found.append(section)
        if child is not None:
            current, until, before = child, child.end, None
        else:  # it has nothing before: go on in its parent, before its start
            before = until = current.start
            current = current.parent
    return found


def _last(span: _Cut, before: int | None) -> _Cut | None:
    """The child that ends last, strictly before a moment if one is given; the first of equals."""
    ended = (child for child in span.children if before is None or child.end < before)
    return max(ended, key=lambda child: child.end, default=None)


def _tree(spans: Sequence[Span]) -> _Cut | None:
    """The earliest span without a parent here, with its descendants, each cut to its parent; what lies outside is
    left out."""
    here = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        children.setdefault(span.parent_id if span.parent_id in here else "", []).append(span)
    if not children.get(""):
        return None
    first = children[""][0]
    root = _Cut(first.span_id, None, first.start_us, first.start_us + first.duration_us)
    queue, seen = [root], {root.span_id}
    for parent in queue:
        for span in children.get(parent.span_id, ()):
            start, end = span.start_us, span.start_us + span.duration_us
            if span.span_id in seen or start >= parent.end or (start < parent.start and end <= parent.start):
                continue
            cut = _Cut(span.span_id, parent, max(start, parent.start), min(end, parent.end))
            seen.add(cut.span_id)
            parent.children.append(cut)
            queue.append(cut)
    return root
