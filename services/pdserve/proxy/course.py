"""When one attempt did what, on the proxy's own clock. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdserve.proxy.parts import SAME_CLOCK, Skew
from pdserve.proxy.types import TransferFacts


@dataclass(frozen=True, slots=True)
class Course:
    """Monotonic nanoseconds; 0 where something did not happen."""

    began_ns: int = 0
    """Its engines were chosen."""
    dispatched_ns: int = 0
    """Its legs are being opened."""
    first_byte_ns: int = 0
    """The first token that it gave was written to the client."""
    last_token_ns: int = 0
    """The proxy had the last token that it gave."""
    ended_ns: int = 0
    points: Mapping[int, int] = field(default_factory=dict)
    """By Point: what the services have stamped, and TOKEN_RECEIVED."""
    prefill_clock: Skew = SAME_CLOCK
    decode_clock: Skew = SAME_CLOCK
    facts: TransferFacts | None = None
    """What decode said of the hand-over at its end, with times on our clock."""


def on_our_clock(facts: TransferFacts, skew: Skew) -> TransferFacts:
    """`skew`: of the host that the facts come from. A time of 0 is not known and stays so."""
    times = ("first_post_ns", "landed_ns", "offered_ns", "accepted_ns", "last_byte_ns")
    return replace(facts, **{name: at - skew.offset_ns for name in times if (at := getattr(facts, name))})
