"""What the folder of a comparison says together: curves, ratios, one document for each configuration. Pure."""

import dataclasses
from collections.abc import Sequence

from pdserve.bench.compare.configurations import CONFIGURATIONS, Key
from pdserve.bench.compare.folder import Cell
from pdserve.bench.compare.ratios import Curve, Pair, against, curve
from pdserve.bench.results import Results

PAIRS: Sequence[tuple[Key, Key]] = (("d", "b"), ("c", "b"), ("d", "e"), ("c", "e"), ("d", "a"), ("c", "a"), ("d", "c"))
"""Which configuration is put over which: the split against the colocated ones, then WRITE against READ."""


_HALF = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What is known when a comparison ends, or breaks off."""

    curves: tuple[Curve, ...]
    ratios: tuple[Pair, ...]
    pooled: tuple[Results, ...]
    """One document for each configuration, with the runs of all repeats: what a report takes."""
    letters: tuple[str, ...]
    """Of those: a report's letters, the configurations' keys in capitals."""

    @property
    def rate(self) -> float | None:
        """Where a report compares: the highest rate at which some configuration kept half of its requests good. Above
        it all have lost, and ratios say little. None: there is none."""
        rates = [point.load.value for one in self.curves for point in one.points if point.attainment >= _HALF]
        return max(rates, default=None)


def outcome(cells: Sequence[tuple[Cell, Results]], threshold: float) -> Outcome:
    """All of it, out of the whole cells in any order; the pair (b) comes first in `pooled`, as the base of a report."""
    curves: list[Curve] = []
    pooled: dict[Key, Results] = {}
    for key in CONFIGURATIONS:
        ours = sorted(
            ((cell.repeat, results) for cell, results in cells if cell.configuration == key), key=lambda pair: pair[0]
        )
        if not ours:
            continue
        found = curve(key, [results.runs for _, results in ours], threshold)
        curves.append(found)
        runs = tuple(run for _, results in ours for run in results.runs)
        first = ours[0][1]
        label = first.label.removeprefix(f"({key}) ")  # the report's letter says it
        pooled[key] = dataclasses.replace(first, label=label, runs=runs, goodput=found.goodput)
    by_key = {one.key: one for one in curves}
    pairs = [(by_key[over], by_key[under]) for over, under in PAIRS if over in by_key and under in by_key]
    order = sorted(pooled, key=lambda key: (key != "b", key))
    return Outcome(
        tuple(curves),
        tuple(against(*pair) for pair in pairs),
        tuple(pooled[key] for key in order),
        tuple(key.upper() for key in order),
    )
