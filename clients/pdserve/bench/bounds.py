"""A value, or all that is known of it; and the quotient of two. Pure."""

from dataclasses import dataclass
from typing import Literal

from pdserve.bench.results import Goodput

Bound = Literal["", "at least", "at most", "unknown"]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A value, or a bound of it."""

    value: float | None
    bound: Bound = ""
    """`at least`, `at most`: the value is only a bound; `unknown`: it is None, for `why`."""
    why: str = ""


def of_goodput(found: Goodput | None) -> Bounded:
    """The highest tried rate that held, requests a second.

    Where the highest of all held it is a lower bound; where none held, the lowest is an upper one. What the uncertainty
    of the shares adds is in the goodput's own `low` and `high`.
    """
    if found is None:
        return Bounded(None, "unknown", "no goodput")
    rates = [one.rate for one in found.tried]
    if found.value > 0:
        top = found.value >= max(rates) if rates else found.high is None
        return Bounded(found.value, "at least", "the highest rate held") if top else Bounded(found.value)
    lowest = min(rates) if rates else found.high
    if lowest is None:
        return Bounded(None, "unknown", "no run")
    return Bounded(lowest, "at most", "the lowest rate fell short")


def divided(over: Bounded, under: Bounded) -> Bounded:
    """A quotient of two values above 0, each exact or a bound; unknown where the bounds do not tell."""
    if over.value is None or under.value is None:
        return Bounded(None, "unknown", over.why or under.why)
    value = over.value / under.value
    if not over.bound and not under.bound:
        return Bounded(value)
    why = "; ".join(f"{name} {one.why}" for name, one in (("dividend:", over), ("divisor:", under)) if one.bound)
    rises = {"at least": 1, "at most": -1, "": 0}
    signs = {rises[over.bound], -rises[under.bound]} - {0}
    if len(signs) != 1:
        return Bounded(None, "unknown", why)
    return Bounded(value, "at least" if signs == {1} else "at most", why)
