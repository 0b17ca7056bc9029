"""The language of failpoints: what happens at a point, time after time. Pure.

    1*off->1*error(TRANSFER_FAILED)->2*delay(100)->pause

The first time nothing, the second time that error, then twice a delay of 100 ms, then a pause each
time. A count says how often a term acts; without one it acts for ever, so that only the last may go
without. After the last counted term nothing happens any more.

The form is that of FreeBSD's fail(9), as gofail and containerd speak it.
"""

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.rpc.errors import BY_REASON, ConfigError


class Action(enum.Enum):
    """What a term does."""

    OFF = "off"
    """Nothing."""
    ERROR = "error"
    """Raises the error of that reason: error(TRANSFER_FAILED)."""
    DELAY = "delay"
    """Waits so many milliseconds: delay(100)."""
    PAUSE = "pause"
    """Waits until it is released, at most so many seconds: pause or pause(5)."""
    DROP = "drop"
    """What passes here is lost."""
    TWICE = "twice"
    """What passes here comes twice."""
    LATE = "late"
    """What passes here comes after the next one; always with a count, since of nothing but late ones none comes."""
    RETURN = "return"
    """The point's own value becomes this one: return(3.5)."""
    STOP = "stop"
    """The process stops, as by SIGSTOP."""
    KILL = "kill"
    """The process dies, as by SIGKILL."""


LONGEST_PAUSE_S: Final = 60.0
"""Of `pause` without an argument, and the most that one may say."""
_TERM: Final = re.compile(r"(?:(?P<count>[0-9]+)\*)?(?P<action>[a-z]+)(?:\((?P<argument>[^()]*)\))?")
_WITH_ARGUMENT: Final = {Action.ERROR, Action.DELAY, Action.RETURN}
_PERHAPS: Final = {Action.PAUSE}


@dataclass(frozen=True, slots=True)
class Term:
    """One of the terms of a program."""

    action: Action
    count: int | None = None
    """How often it acts; None: for ever."""
    argument: str = ""

    @property
    def number(self) -> float:
        """The argument of a delay (milliseconds), a pause (seconds) or a `return`."""
        return float(self.argument)


def parse(text: str) -> tuple[Term, ...]:
    """The terms of a program.

    Raises:
        ConfigError: it is none; says which term, and why.
    """
    terms = [_term(part.strip()) for part in text.split("->")]
    for term in terms[:-1]:
        if term.count is None:
            raise ConfigError(f"failpoint terms {text!r}: only the last term may go without a count")
    return tuple(terms)


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise ConfigError(f"failpoint term {text!r} is not [COUNT*]ACTION[(ARGUMENT)]")
    try:
        action = Action(match["action"])
    except ValueError:
        known = ", ".join(action.value for action in Action)
        raise ConfigError(f"failpoint term {text!r}: no such action; there are {known}") from None
    given = match["argument"]
    if (given is None and action in _WITH_ARGUMENT) or (given and action not in _WITH_ARGUMENT | _PERHAPS):
        raise ConfigError(f"failpoint term {text!r}: {action.value} takes {'an' if given is None else 'no'} argument")
    argument = given or (f"{LONGEST_PAUSE_S:g}" if action is Action.PAUSE else "")
    count = int(match["count"]) if match["count"] else None
    if count == 0:
        raise ConfigError(f"failpoint term {text!r} never acts")
    if action is Action.LATE and count is None:
        raise ConfigError(f"failpoint term {text!r}: late takes a count, or nothing would ever come; drop says that")
    _check(text, action, argument)
    return Term(action, count, argument)


def _check(text: str, action: Action, argument: str) -> None:
    if action is Action.ERROR and argument not in BY_REASON:
        raise ConfigError(f"failpoint term {text!r}: no error has the reason {argument}")
    if action is Action.RETURN and not math.isfinite(_number(argument)):
        raise ConfigError(f"failpoint term {text!r}: not a number")
    if action in (Action.DELAY, Action.PAUSE):
        most = LONGEST_PAUSE_S * (1000 if action is Action.DELAY else 1)
        if not 0 <= _number(argument) <= most:
            raise ConfigError(f"failpoint term {text!r}: not a number in 0..{most:g}")


def _number(argument: str) -> float:
    """What it says; NaN, which lies in no range, where it says none."""
    try:
        return float(argument)
    except ValueError:
        return math.nan


class Program:
    """Terms that are used up as they act."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = list(terms)
        self._used = 0

    def next(self) -> Term:
        """The term that acts now; `off` once all are used up."""
        while self._terms:
            term = self._terms[0]
            if term.count is None:
                return term
            if self._used < term.count:
                self._used += 1
                return term
            self._terms.pop(0)
            self._used = 0
        return Term(Action.OFF)
