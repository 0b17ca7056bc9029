"""A part of the page that its caller writes: sentences, and tables with lines below them. Values only."""

from dataclasses import dataclass

from pdserve.bench.report.picture import Table


@dataclass(frozen=True, slots=True)
class Chapter:
    """Stands behind the result at one load."""

    title: str
    said: tuple[str, ...]
    """Sentences above the tables."""
    tables: tuple[tuple[str, Table | None, tuple[str, ...]], ...]
    """Each with its heading, and with lines below it; None: there are lines alone."""
