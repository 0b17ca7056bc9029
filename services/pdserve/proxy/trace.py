"""Which trace a request belongs to, the ids of its spans, and what is told to the legs. Pure."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.runtime.telemetry import traceparent
from pdserve.runtime.telemetry.traceparent import Traceparent

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
    """As the caller decided; of a new trace, as its id did."""

    @property
    def traceparent(self) -> str:
        """The header that makes a callee's span a child of the request's own."""
        return Traceparent(self.trace_id, self.span_id, self.sampled).header()

    def child_id(self, *what: str) -> str:
        """The id of a span below the request's own: always the same for the same words, another one in
        every other request."""
        return hashlib.blake2b("\0".join((self.trace_id, self.span_id, *what)).encode(), digest_size=8).hexdigest()

    def attempt_id(self, number: int) -> str:
        """The span of an attempt, from 1, which is the parent of whatever its engines trace themselves."""
        return self.child_id("attempt", str(number))

    def below(self, span_id: str) -> str:
        """The header that makes a callee's span a child of that one."""
        return replace(self, span_id=span_id).traceparent


def accept(header: str, random: RandomBytes, ratio: float = 1.0) -> TraceContext:
    """Joins the trace of a `traceparent` header. A header that breaks the standard starts a new
    trace, as the standard says, of which `ratio` are sampled."""
    caller = traceparent.parse(header) if header else None
    span_id = random(8).hex()
    if caller is not None:
        return TraceContext(caller.trace_id, span_id, caller.span_id, caller.sampled)
    trace_id = random(16).hex()
    return TraceContext(trace_id, span_id, "", in_share(trace_id, ratio))


def in_share(trace_id: str, ratio: float) -> bool:
    """Whether a trace is among that share of all: the same answer in every process, since the id is
    random in its last 64 bits."""
    return int(trace_id[16:], 16) < round(ratio * 2**64)
