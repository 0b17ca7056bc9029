"""When one attempt did what, on the proxy's own clock. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdserve.proxy.parts import SAME_CLOCK, Point, Skew, shifted, skew
from pdserve.proxy.types import Progress, Stamps, TransferFacts

PREFILLS = frozenset({Point.PREFILL_RECEIVED, Point.PREFILL_SCHEDULED, Point.PREFILL_FORWARD_END})
DECODES = frozenset(range(Point.DECODE_RECEIVED, Point.DETOKENIZED + 1))
"""Points that these services stamp."""


@dataclass(frozen=True, slots=True)
class Side:
    """What one leg of an attempt has said of when; empty: it was not asked."""

    at: Mapping[int, int] = field(default_factory=dict)
    """By Point, on our clock."""
    unseen: frozenset[int] = frozenset()
    """Points that it may have passed without our knowing when."""
    clock: Skew = SAME_CLOCK

    @classmethod
    def heard(cls, stamps: Stamps, stamping: frozenset[int], boot_id: str, sent_ns: int, told_ns: int) -> "Side":
        """It has said its stamps. `stamping`: the points of its service."""
        clock = skew(stamps, boot_id, sent_ns, told_ns)
        return cls(shifted(stamps, clock), stamping.difference(stamps.at), clock)

    @classmethod
    def failed(
        cls, progress: Progress | None, stamping: frozenset[int], boot_id: str, sent_ns: int, told_ns: int
    ) -> "Side":
        """It has failed, and said how far it had come; None: nothing, so that it may be anywhere."""
        if progress is None:
            return cls(unseen=stamping)
        stamps = progress.stamps
        # The last that it stamped may lie far before its end.
        ended: dict[int, int] = {Point.FIRST_BYTE_WRITTEN: progress.ended_ns} if progress.ended_ns else {}
        clock = skew(Stamps(stamps.boot_id, {**stamps.at, **ended}), boot_id, sent_ns, told_ns)
        return cls(shifted(stamps, clock), progress.unseen & stamping, clock)


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
    unseen: frozenset[int] = frozenset()
    """By Point: what may have been passed without anybody's saying when. What is neither here nor stamped was not
    reached."""
    prefill_clock: Skew = SAME_CLOCK
    decode_clock: Skew = SAME_CLOCK
    facts: TransferFacts | None = None
    """What decode said of the hand-over at its end, or with its error; times on our clock."""


def on_our_clock(facts: TransferFacts, skew: Skew) -> TransferFacts:
    """`skew`: of the host that the facts come from. A time of 0 is not known and stays so."""
    times = ("first_post_ns", "landed_ns", "offered_ns", "accepted_ns", "last_byte_ns")
    return replace(facts, **{name: at - skew.offset_ns for name in times if (at := getattr(facts, name))})
