"""Where the time to first token went: cut points in, disjoint parts out. Pure.

Part k = max(0, t_k - max of all earlier t): parts cannot overlap, and what runs beside something
longer counts nothing. No part is a remainder: the interval that ends at a point whose predecessor
was not stamped belongs to nobody and is `unattributed`. In WRITE decode is asked together with prefill, so
what decode stamps does not show how long prefill took: where prefill has not said when its forward pass
ended, nothing before the KV's landing is a part of decode's.

        received  tokenized  admitted  routed  P received ...              first byte written
    t      |----------|---------|--------|--------|---- ... ---------------------|
    part     tokenize    admit     route   prefill.hop                  egress

`admit` (the wait for credits) comes after `tokenize`: what a request needs is known only then.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.proxy.types import Mode, Stamps, Timings


class Point(enum.IntEnum):
    """Cut points; up to FIRST_BYTE_WRITTEN the numbers are those of pdserve.api.common.v1.CutPoint."""

    RECEIVED = 1
    ADMITTED = 2
    TOKENIZED = 3
    ROUTED = 4
    PREFILL_RECEIVED = 5
    PREFILL_SCHEDULED = 6
    PREFILL_FORWARD_END = 7
    DECODE_RECEIVED = 8
    DECODE_BLOCKS_RESERVED = 9
    KV_LANDED = 10
    DECODE_SCHEDULED = 11
    FIRST_TOKEN_SAMPLED = 12
    DETOKENIZED = 13
    FIRST_BYTE_WRITTEN = 14
    # The proxy's own, never on the wire.
    REDISPATCHED = 101
    """Legs of the attempt that succeeded were opened, after an earlier one had failed."""
    TOKEN_RECEIVED = 102
    """The proxy has decode's first token."""


Chain = tuple[tuple[Point, str], ...]

_HEAD: Chain = ((Point.TOKENIZED, "tokenize"), (Point.ADMITTED, "admit"), (Point.ROUTED, "route"))
_RETRY: Chain = ((Point.REDISPATCHED, "retry"),)
_HANDED_OVER: Chain = (
    (Point.PREFILL_RECEIVED, "prefill.hop"),
    (Point.PREFILL_SCHEDULED, "prefill.queue"),
    (Point.PREFILL_FORWARD_END, "prefill.forward"),
    (Point.DECODE_RECEIVED, "proxy.serialization"),
    (Point.DECODE_BLOCKS_RESERVED, "decode.admit"),
    (Point.KV_LANDED, "kv.wait"),
    (Point.DECODE_SCHEDULED, "decode.queue"),
    (Point.FIRST_TOKEN_SAMPLED, "decode.first_step"),
)
_ALONE: Chain = (
    (Point.DECODE_RECEIVED, "decode.hop"),
    (Point.DECODE_SCHEDULED, "decode.queue"),
    (Point.FIRST_TOKEN_SAMPLED, "decode.first_step"),
)
_TAIL: Chain = (
    (Point.DETOKENIZED, "detokenize"),
    (Point.TOKEN_RECEIVED, "encode"),
    (Point.FIRST_BYTE_WRITTEN, "egress"),
)


def chain(*, handed_over: bool, retried: bool) -> Chain:
    """The points that a request of this kind passes after `received`, each with its part's name."""
    return (*_HEAD, *(_RETRY if retried else ()), *(_HANDED_OVER if handed_over else _ALONE), *_TAIL)


def tail(*, handed_over: bool) -> Chain:
    """The points that one attempt passes after its legs are opened."""
    return (*(_HANDED_OVER if handed_over else _ALONE), *_TAIL)


HEAD: Chain = _HEAD
"""The points before the first attempt."""
RETRY: Chain = _RETRY
"""The point that follows them where an attempt has failed."""
BESIDE = frozenset({Point.DECODE_RECEIVED, Point.DECODE_BLOCKS_RESERVED})
"""Points that decode passes in WRITE whatever prefill does."""


@dataclass(frozen=True, slots=True)
class Interval:
    """From the latest point so far to this one."""

    part: str
    """Empty: a point between was not stamped, so that it belongs to nobody."""
    start_ns: int
    end_ns: int
    """Of an interval that something longer hides: its start."""


def intervals(points: Mapping[int, int], path: Chain, start_ns: int, end_ns: int, mode: Mode | None) -> list[Interval]:
    """What the stamped points of `path` cut out of the time from `start_ns` to `end_ns`, in order. A
    point that another host's clock puts outside counts as being at the edge. `mode`: how the KV comes; None: it
    does not, or not yet."""
    # A wait for KV that begins while prefill computes would be prefill's time under another name.
    hidden = BESIDE if mode is Mode.WRITE and Point.PREFILL_FORWARD_END not in points else frozenset[Point]()
    latest = start_ns
    explained = True
    found: list[Interval] = []
    for point, name in path:
        at = points.get(point)
        if at is None or point in hidden:
            explained = False
            continue
        at = max(latest, min(at, end_ns))
        found.append(Interval(name if explained else "", latest, at))
        explained = True
        latest = at
    return found


def split(points: Mapping[int, int], path: Chain, ended_ns: int, mode: Mode | None) -> Timings:
    """The parts of a request whose `points` (nanoseconds of one clock) hold RECEIVED and
    FIRST_BYTE_WRITTEN, and which ended at `ended_ns`. `mode`: how the KV came; None: it did not.
    """
    received, written = points[Point.RECEIVED], points[Point.FIRST_BYTE_WRITTEN]
    cut = intervals(points, path, received, written, mode)
    parts = {interval.part: (interval.end_ns - interval.start_ns) / 1e9 for interval in cut if interval.part}
    unattributed = sum(interval.end_ns - interval.start_ns for interval in cut if not interval.part)
    return Timings(
        ttft=(written - received) / 1e9,
        parts=parts,
        unattributed=unattributed / 1e9,
        e2e=(max(ended_ns, written) - received) / 1e9,
    )


@dataclass(frozen=True, slots=True)
class Skew:
    """How a peer's clock stands to ours."""

    offset_ns: int = 0
    """To be taken off its stamps."""
    uncertainty_ns: int = 0
    """Either way; 0: it is the same clock."""


SAME_CLOCK = Skew()


def skew(stamps: Stamps, boot_id: str, sent_ns: int, received_ns: int) -> Skew:
    """Equal boot ids share the clock. Another host's clock is set so that the way there, from `sent_ns`
    to its first stamp, and the way back, from its last stamp to `received_ns`, take equally long."""
    if not stamps.at or stamps.boot_id == boot_id:
        return SAME_CLOCK
    first, last = min(stamps.at.values()), max(stamps.at.values())
    ways = (received_ns - sent_ns) - (last - first)
    return Skew(((first - sent_ns) + (last - received_ns)) // 2, max(0, ways) // 2)


def shifted(stamps: Stamps, clock: Skew) -> dict[int, int]:
    """A peer's stamps on our clock."""
    return {point: at - clock.offset_ns for point, at in stamps.at.items()}
