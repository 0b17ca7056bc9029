"""Attainment, good rate, goodput: their one definition, and the search for the last. Pure.

attainment(r) = share of the requests offered at rate r that meet every objective
good rate(r)  = attainment(r) x r
goodput       = the highest r with attainment(r) >= threshold
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from pdserve.bench.results import Goodput, Tried
from pdserve.rpc.errors import ConfigError

THRESHOLD = 0.9
"""Share of requests that has to be good, unless told otherwise."""

_Z = 1.959963984540054
"""97.5 % point of the normal distribution: 95 % between it and its mirror."""


def attainment(missed: Sequence[Sequence[str]]) -> float:
    """Share of requests that missed nothing, in [0, 1]; a failed one must have missed `error`. 0 of none."""
    return sum(not one for one in missed) / len(missed) if missed else 0.0


def good_rate(share: float, rate: float) -> float:
    """Good requests a second at an offered rate."""
    return share * rate


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was counted among `count` (Wilson, J. Am. Stat. Assoc. 22, 1927).

    Requests of one run queue behind each other and are not independent: the true interval is wider.
    """
    if count < 1:
        return 0.0, 1.0
    square = _Z * _Z / count
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / count / 4)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def fewest(threshold: float) -> int | None:
    """The least number of requests of which all have to be good to hold `threshold` by more than the 95 % interval:
    count / (count + z^2) >= threshold. None: no number does, of a threshold of 1."""
    return math.ceil(threshold * _Z * _Z / (1 - threshold)) if threshold < 1 else None


def goodput_of(tried: Sequence[Tried], threshold: float, why: str) -> Goodput:
    """The goodput that a list of measured rates shows.

    Args:
        tried: any order, each with its requests.
        threshold: share that has to be good.
        why: how the rates came about, in words.

    Returns:
        `value`: the highest rate that held. `low` and `high` are its uncertainty: between two tried rates the
        goodput may lie anywhere, and a share out of n requests is itself uncertain. So `low` is the highest rate, not
        above `value`, that held by more than its 95 % interval, and `high` the lowest above `value` that fell
        short by more than that.
    """
    value = max((one.rate for one in tried if one.attainment >= threshold), default=0.0)
    sure = (one.rate for one in tried if one.rate <= value and _interval(one)[0] >= threshold)
    short = (one.rate for one in tried if one.rate > value and _interval(one)[1] < threshold)
    return Goodput(threshold, value, max(sure, default=0.0), min(short, default=None), tuple(tried), why)


def unproven(found: Goodput) -> str:
    """Why there is a value and no `low`, where no rate up to it had enough requests; empty: that is not why."""
    most = max((one.requests for one in found.tried if one.rate <= found.value), default=0)
    need = fewest(found.threshold)
    if not found.value or found.low or not most or (need is not None and most >= need):
        return ""
    takes = f"it takes {need}" if need is not None else "no number can"
    return f"too few requests for a bound: {most} cannot prove {found.threshold:.0%}, even all good {takes}"


def _interval(one: Tried) -> tuple[float, float]:
    return wilson(one.attainment, one.requests)


@dataclass(frozen=True, slots=True)
class Search:
    """Bisection for the goodput between two rates.

    Raises:
        ConfigError: a value that cannot be.
    """

    low: float
    """Requests a second that should hold."""
    high: float
    """Requests a second that should not."""
    threshold: float = THRESHOLD
    tolerance: float = 0.05
    """The search ends when (failed - held) / failed is at most this."""
    most: int = 12
    """Rates that are tried at most."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ConfigError(f"a search from {self.low:g} to {self.high:g} requests a second: positive, and upwards")
        check_threshold(self.threshold)
        if not 0 < self.tolerance < 1 or self.most < 2:
            raise ConfigError("a search needs a tolerance between 0 and 1, and at least two rates")

    def steps(self) -> Generator[float, tuple[float, int], Goodput]:
        """Yields rates to measure, is sent the attainment of each and its requests, returns what they show.

        The ends come first: where the lower one fails or the upper one holds there is nothing to bisect, and the answer
        says so.
        """
        tried: list[Tried] = []

        def told(rate: float, measured: tuple[float, int]) -> bool:
            share, requests = measured
            tried.append(Tried(rate, share, requests))
            return share >= self.threshold

        def found(why: str) -> Goodput:
            return goodput_of(tried, self.threshold, why)

        if not told(self.low, (yield self.low)):
            return found(f"the lowest rate, {self.low:g}, fell short: the goodput is below it")
        if told(self.high, (yield self.high)):
            return found(f"the highest rate, {self.high:g}, held: the goodput is at least that")
        held, failed = self.low, self.high
        while (failed - held) / failed > self.tolerance and len(tried) < self.most:
            middle = (held + failed) / 2
            if told(middle, (yield middle)):
                held = middle
            else:
                failed = middle
        ended = "" if (failed - held) / failed <= self.tolerance else f", ended after {self.most} rates"
        return found(f"bisection to {(failed - held) / failed:.1%} between {held:.4g} and {failed:.4g}{ended}")


def check_threshold(threshold: float) -> None:
    """Raises ConfigError where it is no share."""
    if not 0 < threshold <= 1:
        raise ConfigError(f"a threshold of {threshold:g}: above 0 and at most 1")
