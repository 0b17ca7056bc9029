"""The W3C header `traceparent`: read and written. Pure."""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")

HEADER = "traceparent"


@dataclass(frozen=True, slots=True)
class Traceparent:
    """A caller's place in a trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool

    def header(self) -> str:
        """As it is sent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def parse(header: str) -> Traceparent | None:
    """None for a header that breaks the standard, which then counts as none."""
    found = _TRACEPARENT.match(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    whole = version != "ff" and not (version == "00" and rest)
    if not (whole and trace_id.strip("0") and span_id.strip("0")):
        return None
    return Traceparent(trace_id, span_id, bool(int(flags, 16) & 1))
