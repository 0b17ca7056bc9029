"""How reports and plans write numbers: durations, shares, rates and ratios as text. Pure."""

import math
from decimal import Decimal

NONE = "–"
"""Stands where there is no value."""


def seconds(value: float | None) -> str:
    """A duration given in seconds: three digits, in the unit that suits it."""
    if value is None:
        return NONE
    if value == 0:
        return "0 s"
    size = abs(value)
    if size < 0.9995:
        return f"{digits(value * 1000)} ms"
    return f"{digits(value)} s"


def objective(value: float) -> str:
    """An objective given in seconds, as the user wrote it: 1 s, 50 ms."""
    return f"{value * 1000:.4g} ms" if value < 1 else f"{value:.4g} s"


def rate(value: float | None) -> str:
    """Something a second: three digits, no trailing zeros."""
    if value is None:
        return NONE
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def few(sentences: list[str], most: int = 6) -> tuple[str, ...]:
    """The first ones, and how many more there are."""
    if len(sentences) <= most:
        return tuple(sentences)
    return (*sentences[: most - 1], f"{len(sentences) - most + 1} more are in the numbers.")


def listed(items: list[str], most: int = 6) -> str:
    """One sentence's worth: a; b; c."""
    return "; ".join(few(items, most)).removesuffix(".") + "."


def milliseconds(value: float | None) -> str:
    """A duration given in seconds, as milliseconds without the unit: for a column whose head has it."""
    return NONE if value is None else digits(value * 1000)


def digits(value: float | None) -> str:
    """Three significant digits, never in powers of ten, all digits before the point kept."""
    if value is None:
        return NONE
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    places = min(6, max(0, 2 - math.floor(math.log10(size))))
    shown = f"{value:.{places}f}"
    # 9.996 is 10.0, not 10.00.
    if places and abs(float(shown)) >= 10 ** (3 - places):
        shown = f"{value:.{places - 1}f}"
    return shown


def plain(value: float | None) -> str:
    """A number as a person would write it, at most four digits and no trailing zeros: 8, 0.5, 7.25, 12000."""
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def number(value: float, digits: int = 3) -> str:
    """Of so many digits, without an exponent and without trailing zeros, thousands parted: 2,750 or 0.0042; a whole
    number has all of its digits."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def percent(share: float | None) -> str:
    """A share in [0, 1]. Only a true 1 is written 100 %, and only a true 0 is written 0 %."""
    if share is None:
        return NONE
    value = share * 100
    shown = f"{value:.1f}".removesuffix(".0")
    if shown == "100" and share < 1:
        return "> 99.9 %"
    if shown == "0" and share > 0:
        return "< 0.1 %"
    return f"{shown} %"


def ratio(value: float | None) -> str:
    """A ratio, two places below 10 and one above."""
    if value is None:
        return NONE
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def count(number: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def joined(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def short(words: str, most: int) -> str:
    """At most `most` characters; what is cut off is marked."""
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"
