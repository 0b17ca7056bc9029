"""W3C trace context: which trace a request belongs to, and what is told to the legs. Pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")

RandomBytes = Callable[[int], bytes]
"""That many random bytes."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Our place in a trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits: the request's own span."""
    parent_id: str
    """The caller's span; empty: we are the root."""
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The header that makes a callee's span a child of ours."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def accept(header: str, random: RandomBytes) -> TraceContext:
    """Joins the trace of a `traceparent` header. A header that breaks the standard starts a new
    trace, as the standard says."""
    found = _TRACEPARENT.match(header.strip()) if header else None
    span_id = random(8).hex()
    if found:
        version, trace_id, parent_id, flags, rest = found.groups()
        whole = version != "ff" and not (version == "00" and rest)
        if whole and trace_id.strip("0") and parent_id.strip("0"):
            return TraceContext(trace_id, span_id, parent_id, bool(int(flags, 16) & 1))
    return TraceContext(random(16).hex(), span_id, "", True)
