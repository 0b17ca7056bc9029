"""Seconds as whole microseconds, by one rule for every list and table, which the page's `format.js` has too. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

_APART_NS = 500
"""What parts may miss their whole by and still be said to sum to it."""


def microseconds(seconds: float) -> int:
    """Of the whole nanoseconds that stamps have, half to even."""
    ns = round(abs(seconds) * 1e9)
    whole, rest = divmod(ns, 1000)
    whole += rest > 500 or (rest == 500 and whole % 2 == 1)
    return -whole if seconds < 0 else whole


def apportioned(seconds: Sequence[float], whole: float) -> list[int] | None:
    """Each as microseconds, so that they sum to those of `whole`: what rounding down loses goes to the largest
    remainders, among equals to the first. None: they do not add up to it."""
    exact = [round(value * 1e9) for value in seconds]
    if abs(sum(exact) - round(whole * 1e9)) > _APART_NS:
        return None
    shares = [ns // 1000 for ns in exact]
    left = microseconds(whole) - sum(shares)
    by_remainder = sorted(range(len(exact)), key=lambda n: -(exact[n] % 1000))
    for n in by_remainder[: max(left, 0)]:
        shares[n] += 1
    if left < 0:  # the whole is a little less than its parts
        shares[max(range(len(shares)), key=shares.__getitem__)] += left
    return shares


def of_request(row: Mapping[str, Any]) -> dict[str, int]:
    """Microseconds of each part of a request, `unattributed` last, as its table has them."""
    given: dict[str, float] = {**row["parts"], "unattributed": row["unattributed"] or 0.0}
    whole = row["failed_after"] if row.get("failed_in") else row["ttft"]
    shares = None if whole is None else apportioned(list(given.values()), whole)
    return dict(zip(given, shares or [microseconds(value) for value in given.values()], strict=True))


def milliseconds(us: int) -> str:
    """Microseconds as milliseconds, with all three digits."""
    return f"{us / 1000:.3f}"
