"""The moments of a request that an engine's service can stamp, and how far a call has come by them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.kvd.client.messages import Facts


class Cut(enum.Enum):
    """Where a stamp was taken; the value is the wire's name."""

    PREFILL_RECEIVED = "CUT_POINT_PREFILL_RECEIVED"
    PREFILL_SCHEDULED = "CUT_POINT_PREFILL_SCHEDULED"
    PREFILL_FORWARD_END = "CUT_POINT_PREFILL_FORWARD_END"
    DECODE_RECEIVED = "CUT_POINT_DECODE_RECEIVED"
    DECODE_BLOCKS_RESERVED = "CUT_POINT_DECODE_BLOCKS_RESERVED"
    KV_LANDED = "CUT_POINT_KV_LANDED"
    DECODE_SCHEDULED = "CUT_POINT_DECODE_SCHEDULED"
    FIRST_TOKEN_SAMPLED = "CUT_POINT_FIRST_TOKEN_SAMPLED"
    DETOKENIZED = "CUT_POINT_DETOKENIZED"


Stamps = Mapping[Cut, int]
"""Monotonic nanoseconds by cut point; 0 where not known."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far one call has come; the session writes it while it works, and it is told if the call fails."""

    stamps: dict[Cut, int] = field(default_factory=dict)
    """Monotonic nanoseconds; 0 where not known, as an engine says that has no times."""
    unseen: set[Cut] = field(default_factory=set)
    """Points that may have been passed without the service's knowing: the engine is the one to tell, and tells it
    only with its tokens."""
    facts: Facts | None = None
    """What kvd has said of the hand-over."""

    def passed(self, cut: Cut, at_ns: int) -> None:
        """A point was passed; 0: nobody has said when."""
        if at_ns:
            self.stamps[cut] = at_ns
            self.unseen.discard(cut)
        else:
            self.unseen.add(cut)
