"""The moments of a request that an engine's service can stamp: names for the wire's cut points."""

import enum
from collections.abc import Mapping


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
