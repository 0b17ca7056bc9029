"""The token budget of the tuned colocated pair: which values are tried, and which one is taken. Pure.

A step that carries T prompt tokens takes about the decode step plus T x (TTFT / prompt length). The ITL objective
leaves (objective - median ITL) for the prompt tokens, hence a first guess. Tried are the largest power of two not above
it (at least 16), its double and its fourfold: at the middle rate, with the arrivals of the first repeat. Taken is the
highest attainment; of equal ones the higher ITL attainment, then the larger budget, which has the shorter TTFT.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.compare.objectives import Calibration, slo_of
from pdserve.bench.results import Run
from pdserve.rpc.errors import ConfigError

LEAST = 16
"""Tokens; below it a prompt takes more steps than an answer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One budget, tried."""

    budget: int
    """Most tokens in one step."""
    attainment: float
    itl_attainment: float
    """Share of requests that met the ITL objective, whatever their TTFT."""


def candidates(calibration: Calibration, input_len: int, wanted: Sequence[int]) -> tuple[int, ...]:
    """Budgets to try: those that were asked for, or the rule's three; ascending."""
    if wanted:
        return tuple(sorted(set(wanted)))
    objective = slo_of(calibration).itl or 0.0
    guess = (objective - calibration.itl) * input_len / calibration.ttft
    base = LEAST
    while base * 2 <= guess:
        base *= 2
    return base, 2 * base, 4 * base


def trial_of(budget: int, run: Run) -> Trial:
    """What a run says of a budget."""
    records = run.requests
    met = sum(not {"itl", "error"} & set(record.missed) for record in records)
    return Trial(budget, run.summary.attainment, met / len(records) if records else 0.0)


def best(trials: Sequence[Trial]) -> Trial:
    """The one to take.

    Raises:
        ConfigError: none was tried.
    """
    if not trials:
        raise ConfigError("no token budget was tried")
    return max(trials, key=lambda trial: (trial.attainment, trial.itl_attainment, trial.budget))
