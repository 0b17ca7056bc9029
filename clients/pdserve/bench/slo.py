"""Service level objectives: which of them one request missed. Pure; needs nothing but the standard library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.rpc.errors import ConfigError

ItlOf = Literal["p99", "mean", "max"]
"""Which figure of one request's gaps between tokens is held against the ITL objective."""

ITL_OF: tuple[ItlOf, ...] = ("p99", "mean", "max")


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, q in [0, 100], with linear interpolation: numpy.percentile's default, to the last bit.

    Raises:
        ValueError: there is no value.
    """
    return sorted_percentile(sorted(values), q)


def sorted_percentile(ordered: Sequence[float], q: float) -> float:
    """`percentile` of values that ascend already."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    place = (len(ordered) - 1) * (q / 100)
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    part = place - below
    # From the nearer end, as numpy does: that is what makes the last bit the same.
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def itl_figure(itls: Sequence[float], of: ItlOf) -> float | None:
    """One request's figure out of its gaps between tokens; None where it had one token, hence no gap."""
    if not itls:
        return None
    if of == "p99":
        return percentile(itls, 99)
    return max(itls) if of == "max" else sum(itls) / len(itls)


@dataclass(frozen=True, slots=True)
class Slo:
    """What one request has to meet, all of it; None: not asked for. A value equal to its objective meets it.

    Raises:
        ConfigError: an objective is not a positive, finite number of seconds, or `itl_of` is unknown.
    """

    ttft: float | None = None
    """Seconds from sending the request to its first token."""
    itl: float | None = None
    """Seconds between two tokens, of one request, as `itl_of` says."""
    itl_of: ItlOf = "p99"
    """The figure held against `itl`: the request's 99th percentile, its mean, or its longest gap."""
    tpot: float | None = None
    """Seconds a token after the first: (e2e - ttft) / (tokens - 1)."""
    e2e: float | None = None
    """Seconds from sending the request to its last token."""

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"the SLO on {name.upper()} is {value}: not a positive number of seconds")
        if self.itl_of not in ITL_OF:
            raise ConfigError(f"the SLO on ITL is of {self.itl_of!r}: not one of {', '.join(ITL_OF)}")

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for; then every request that succeeds is good."""
        return self.ttft is self.itl is self.tpot is self.e2e is None

    def missed(
        self, *, ttft: float, itls: Sequence[float] = (), tpot: float | None = None, e2e: float | None = None
    ) -> tuple[str, ...]:
        """Names of the objectives that a request missed, in the order of the fields; empty: it was good.

        `itls` are all its gaps, in any order. A request of one token has no gap and no TPOT, and cannot miss them.
        """
        itl = itl_figure(itls, self.itl_of) if self.itl is not None else None
        return self.missed_figures(ttft=ttft, itl=itl, tpot=tpot, e2e=e2e)

    def missed_figures(
        self, *, ttft: float | None, itl: float | None = None, tpot: float | None = None, e2e: float | None = None
    ) -> tuple[str, ...]:
        """As `missed`, where the ITL's figure has been computed already."""
        pairs = (("ttft", self.ttft, ttft), ("itl", self.itl, itl), ("tpot", self.tpot, tpot), ("e2e", self.e2e, e2e))
        return tuple(name for name, most, value in pairs if most is not None and value is not None and value > most)
