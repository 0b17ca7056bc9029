"""Finds constants that make a simulation fit: differential evolution, seeded. Pure.

A simulated run is not smooth in its constants (a request that just misses a step changes all that
follow), so nothing that uses slopes works. Storn and Price 1997, variant best/1/bin with a weight
drawn per generation, as scipy.optimize.differential_evolution has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CROSSOVER = 0.7
WEIGHTS = (0.5, 1.0)
DIGITS = 4
"""Significant ones of a constant: what is stored is what was judged."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best constants."""

    values: tuple[float, ...]
    """In the order of the bounds, rounded to DIGITS."""
    objective: float
    """Of these values."""
    evaluations: int
    """How many runs it took."""


def minimise(
    objective: Callable[[tuple[float, ...]], float],
    bounds: Sequence[tuple[float, float]],
    *,
    seed: int,
    generations: int,
    population: int,
) -> Found:
    """The best of all values tried within `bounds`; the same seed finds the same."""
    rng = np.random.default_rng(seed)
    low, high = np.array(bounds).T
    # Latin hypercube: each member has a stratum of its own in each constant.
    strata = np.array([rng.permutation(population) for _ in bounds]).T
    members = (strata + rng.random(strata.shape)) / population
    judged = [objective(_values(low + m * (high - low))) for m in members]
    evaluations = population
    for _ in range(generations):
        weight = rng.uniform(*WEIGHTS)
        for i in range(population):
            best = members[int(np.argmin(judged))]
            first, second = rng.choice([j for j in range(population) if j != i], 2, replace=False)
            mutant = best + weight * (members[first] - members[second])
            outside = (mutant < 0) | (mutant > 1)
            mutant[outside] = rng.random(int(outside.sum()))
            crossed = rng.random(len(bounds)) < CROSSOVER
            crossed[rng.integers(len(bounds))] = True
            trial = np.where(crossed, mutant, members[i])
            worth = objective(_values(low + trial * (high - low)))
            evaluations += 1
            if worth <= judged[i]:
                members[i], judged[i] = trial, worth
    best_index = int(np.argmin(judged))
    return Found(_values(low + members[best_index] * (high - low)), judged[best_index], evaluations)


def _values(raw: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in raw)
