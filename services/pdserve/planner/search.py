"""The highest rate that holds, by doubling and bisection. Pure."""

from collections.abc import Callable

from pdserve.rpc.errors import ConfigError

_MOST = 1e5
"""Requests a second above which nothing is looked for."""


def highest(
    holds: Callable[[float], bool],
    *,
    start: float = 1.0,
    precision: float,
    lowest: float = 1 / 64,
    step: float = 2.0,
) -> float:
    """The highest rate that holds, to a relative `precision`; 0 where `lowest` does not hold.

    `step`: factor by which the rate is moved away from `start` until one holds and the next does not; a small one where
    `start` is near already.

    Raises:
        ConfigError: every rate holds.
    """
    low = high = start
    while not holds(low):
        low, high = low / step, low
        if low < lowest:
            return 0.0
    if low == start:
        high = low * step
        while holds(high):
            low, high = high, high * step
            if high > _MOST:
                raise ConfigError("every rate meets this SLO: there is no goodput to find")
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
