"""Counts and distributions of one service since its start. Pure; for one thread."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pdserve.rpc.errors import BY_REASON, PdserveError
from pdserve.runtime.telemetry.catalogue import Kind, Metric

Labels = tuple[str, ...]
"""Values, in the order of Metric.labels."""
Reading = tuple[Metric, Labels, float]
"""What a counter or gauge is at now."""
Reader = Callable[[], Iterable[Reading]]
"""Asked when somebody looks; must not block."""


def known_reason(reason: str) -> str:
    """For a label: one of pdserve.rpc.errors or none; any other is INTERNAL, or whoever makes reasons up could
    make up metrics."""
    return reason if not reason or reason in BY_REASON else PdserveError.reason


@dataclass(slots=True)
class Distribution:
    """How often values fell between which bounds."""

    counts: list[int] = field(default_factory=list)
    """Of each bucket by itself; the last one's upper bound is infinity."""
    sum: float = 0.0

    def cumulative(self, metric: Metric) -> list[tuple[float, int]]:
        """(upper bound, values not above it)."""
        below, found = 0, []
        for bound, count in zip((*metric.bounds, math.inf), self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class Tally:
    """Adding costs about a microsecond."""

    def __init__(self) -> None:
        self._counts: dict[Metric, dict[Labels, float]] = {}
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {}

    def add(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Counts.

        Raises:
            ValueError: the metric is no counter, the labels are not its labels, or `by` is below 0.
        """
        if metric.kind is not Kind.COUNTER or len(labels) != len(metric.labels) or by < 0:
            raise ValueError(f"{metric.name} cannot count {by} for {labels}")
        counts = self._counts.setdefault(metric, {})
        counts[labels] = counts.get(labels, 0) + by

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Takes one value in.

        Raises:
            ValueError: the metric is no histogram, or the labels are not its labels.
        """
        if metric.kind is not Kind.HISTOGRAM or len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} cannot take {value} for {labels}")
        distributions = self._distributions.setdefault(metric, {})
        found = distributions.get(labels)
        if found is None:
            found = distributions[labels] = Distribution([0] * (len(metric.bounds) + 1))
        found.counts[bisect_left(metric.bounds, value)] += 1
        found.sum += value

    def readings(self) -> Iterator[Reading]:
        """All counts."""
        for metric, counts in self._counts.items():
            for labels, value in counts.items():
                yield metric, labels, value

    def distributions(self, metric: Metric) -> Iterator[tuple[Labels, Distribution]]:
        """All of one histogram."""
        yield from self._distributions.get(metric, {}).items()
