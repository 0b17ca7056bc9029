"""Percentiles of the time to first token and of each of its parts, exact over the requests given. Pure.

Requests without a first token are not among them. A part's percentiles are over the requests that
passed it: what decode alone computed has no `kv.wait` at all, rather than one of zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.traces.requests import in_order

TTFT, UNATTRIBUTED = "ttft", "unattributed"
RANKS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's way to its first token, in seconds."""

    start_us: float
    ttft: float
    parts: Mapping[str, float]
    unattributed: float | None


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The value at `rank` of sorted values, at least one, between two of them where it falls there."""
    at = rank * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def table(timings: Sequence[Timing], bucket_us: int) -> dict[str, Any]:
    """Percentiles by bucket, oldest first, and of all; empty buckets are left out."""
    buckets: dict[int, list[Timing]] = {}
    for timing in timings:
        buckets.setdefault(int(timing.start_us // bucket_us), []).append(timing)
    return {
        "parts": in_order({part for timing in timings for part in timing.parts}),
        "buckets": [{"start_us": at * bucket_us, **_summary(buckets[at])} for at in sorted(buckets)],
        "total": _summary(timings),
    }


def _summary(timings: Iterable[Timing]) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    count = 0
    for timing in timings:
        count += 1
        for name, seconds in timing.parts.items():
            columns.setdefault(name, []).append(seconds)
        columns.setdefault(TTFT, []).append(timing.ttft)
        if timing.unattributed is not None:
            columns.setdefault(UNATTRIBUTED, []).append(timing.unattributed)
    for values in columns.values():
        values.sort()
    return {
        "count": count,
        **{label: {name: percentile(values, rank) for name, values in columns.items()} for label, rank in RANKS},
    }
