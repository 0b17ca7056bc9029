"""Where spans may lie beside each other and inside each other, so that trace viewers read them right. Pure.

Jaeger's critical path takes a sibling only where it ends strictly before the next one starts, in
microseconds, and drops what outlives its parent. So siblings leave a gap, and what is too short for
that is not drawn:

    measured    |----a----|--b--|----c----|          the parent's end
    drawn       |---a--|  |-b|  |----c----|
"""

from collections.abc import Sequence
from dataclasses import dataclass

GAP_NS = 2_000
SHORTEST_NS = 1_000
"""Viewers count in microseconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """From and to, nanoseconds."""

    start_ns: int
    end_ns: int


def fit(children: Sequence[Window], parent: Window) -> list[Window | None]:
    """What is drawn of each child, None for nothing. They are given in the order of their starts and do
    not overlap."""
    fitted: list[Window | None] = []
    limit = parent.end_ns
    for child in reversed(children):
        start, end = max(child.start_ns, parent.start_ns), min(child.end_ns, limit)
        if end - start < SHORTEST_NS:
            fitted.append(None)
            continue
        fitted.append(Window(start, end))
        limit = start - GAP_NS
    return fitted[::-1]
