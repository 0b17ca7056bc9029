"""What an id that somebody types may mean. Pure.

a request's id, as it is, or as an answer of the OpenAI API has it: `chatcmpl-ID`, `cmpl-ID`
a trace's id
the first 8 digits or more of either, in any case
"""

import re
from dataclasses import dataclass

LEAST = 8
"""Digits of a beginning: fewer name nothing for sure."""
_PREFIX = re.compile(r"(chat)?cmpl-", re.IGNORECASE)
_DIGITS = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Called:
    """An id that was typed."""

    exact: tuple[str, ...]
    """Whole ids that it may be, as typed first."""
    beginning: str
    """Digits that an id may begin with; empty: it is no beginning."""

    def means(self, an_id: str) -> bool:
        """Whether it may mean this one."""
        return an_id in self.exact or bool(self.beginning and an_id.startswith(self.beginning))


def read(text: str) -> Called:
    """What it may mean; spaces around it do not count."""
    typed = text.strip()
    bare = _PREFIX.sub("", typed, count=1) if _PREFIX.match(typed) else typed
    exact = tuple(dict.fromkeys((typed, typed.lower(), bare, bare.lower())))
    digits = bare.lower()
    return Called(exact, digits if len(digits) >= LEAST and _DIGITS.fullmatch(digits) else "")


def trace(text: str) -> str:
    """The trace's id in full: shorter ones are filled up, as Jaeger does; empty where it can be none."""
    digits = text.strip().lower()
    return digits.zfill(32) if _DIGITS.fullmatch(digits) and len(digits) <= 32 else ""
