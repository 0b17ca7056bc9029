"""Straight lines through noisy times: non-negative, robust against stalls, with what they leave over. Pure.

The sum of w_i * ((row_i . costs - seconds_i) / scale_i)^2 is made least over costs that are 0 or more (Lawson and
Hanson's method, scipy.optimize.nnls). Errors are relative, because steps last from microseconds to seconds. The
weights w come from rounds of the same fit: first those of least absolute deviations, which a few stalls do not move,
then Tukey's biweight, which gives a point beyond 4.685 robust standard deviations no weight at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from pdserve.rpc.errors import ConfigError

Floats = npt.NDArray[np.float64]

_ROUNDS = 25
_BIWEIGHT = 4.685
"""Robust standard deviations: 95 % as sharp as least squares where there are no stalls."""
_SMALLEST = 0.005
"""Relative error below which two points are as near."""
_STEADIEST = 0.02
"""Least robust standard deviation: what is within 9 % of a fit is no stall, however near a few other points are."""


@dataclass(frozen=True, slots=True)
class Line:
    """A fit and how good it is."""

    costs: tuple[float, ...]
    """By column; seconds a unit, none below 0."""
    residuals: tuple[float, ...]
    """(fitted - measured) / scale, by point."""
    counted: tuple[bool, ...]
    """By point: False for one so far off that it was given no weight, such as a stall."""

    @property
    def left_out(self) -> int:
        """Points that were given no weight."""
        return self.counted.count(False)

    @property
    def typical(self) -> float:
        """The median relative error, regardless of its sign; of all points."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def nine_in_ten(self) -> float:
        """Nine of ten of the points that count are as near as this; relative."""
        return float(np.quantile(np.abs(np.array(self.residuals)[np.array(self.counted)]), 0.9))


def fit(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], what: str, scale: Sequence[float] | None = None
) -> Line:
    """The costs a column that explain `seconds` best.

    Args:
        rows: the counts of each point, one column for each cost.
        seconds: what each point took beyond what is known of it already.
        what: of which the points are; for the error's words.
        scale: seconds that errors are relative to; None: `seconds`.

    Raises:
        ConfigError: fewer points than costs, or points that vary in too few ways to tell the costs apart; no fit was
            found.
    """
    design = np.asarray(rows, dtype=float)
    target = np.asarray(seconds, dtype=float)
    unit = np.maximum(np.asarray(seconds if scale is None else scale, dtype=float), 1e-9)
    if design.ndim != 2 or len(design) < design.shape[1]:
        raise ConfigError(f"{what}: {len(rows)} points are too few to fit")
    size = np.abs(design).max(axis=0)
    size[size == 0] = 1.0
    relative = design / size
    if np.linalg.matrix_rank(relative, tol=1e-6) < design.shape[1]:
        raise ConfigError(f"{what}: the points vary in too few ways to tell the costs apart")
    relative, goal = relative / unit[:, None], target / unit
    costs = _solve(relative, goal, np.ones(len(goal)), what)
    for _ in range(_ROUNDS):
        error = np.abs(relative @ costs - goal)
        costs = _solve(relative, goal, 1.0 / np.maximum(error, _SMALLEST), what)
    weights = np.ones(len(goal))
    for _ in range(_ROUNDS):
        error = np.abs(relative @ costs - goal)
        spread = max(1.4826 * float(np.median(error)), _STEADIEST)
        weights = np.clip(1.0 - (error / (_BIWEIGHT * spread)) ** 2, 0.0, None) ** 2
        if np.linalg.matrix_rank(relative * np.sqrt(weights)[:, None]) < design.shape[1]:
            weights = np.ones(len(goal))  # too few points agree: all count, and the residual says so
            costs = _solve(relative, goal, weights, what)
            break
        costs = _solve(relative, goal, weights, what)
    residuals = relative @ costs - goal
    return Line(
        tuple(float(cost) for cost in costs / size),
        tuple(float(residual) for residual in residuals),
        tuple(bool(weight > 0) for weight in weights),
    )


def _solve(rows: Floats, goal: Floats, weights: Floats, what: str) -> Floats:
    root = np.sqrt(weights)
    try:
        costs: Floats = nnls(rows * root[:, None], goal * root)[0]
    except (RuntimeError, ValueError) as error:  # not found within scipy's iterations, or a time that is no number
        raise ConfigError(f"{what}: no fit was found: {error}") from error
    return costs
