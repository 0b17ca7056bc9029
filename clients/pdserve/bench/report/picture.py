"""What one figure is: its title, what it says in words, its numbers as a table, and how to draw it."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.report.figures import Frame, Sheet


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """How many columns, from the left, hold words; the others are numbers and stand to the right."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the report."""

    key: str
    """Its anchor in the page and its file's name: small letters, digits and hyphens."""
    title: str
    """What it is about."""
    finding: tuple[str, ...]
    """What it shows, a few sentences; also its text alternative."""
    table: Table
    """Every number in it."""
    draw: Callable[[Frame], Sheet]
    """Draws it. Runs inside `figures.styled`."""
    note: str = ""
    """How to read it."""
    keyed: bool = True
    """Whether the reader needs to know which letter is which configuration."""
