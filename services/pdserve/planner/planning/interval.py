"""Where a figure of one more run will be, out of those that were made. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy.stats import t

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where one more run of the same size with another seed falls with 95 %."""

    mean: float
    low: float
    high: float
    runs: int
    """Runs behind it."""

    def holds(self, value: float) -> bool:
        """Whether a value lies in it."""
        return self.low <= value <= self.high


def predict(values: Sequence[float], most: float = math.inf, floor: float = 0.0) -> Interval:
    """Student's prediction interval for one more value, cut to [0, most].

    Args:
        values: of runs that differ in their seed alone; at least two.
        most: the greatest value there can be.
        floor: a standard deviation that is known to be there, whatever these few show.
    """
    mean = fmean(values)
    spread = math.sqrt(max(variance(values), floor * floor))
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * spread * math.sqrt(1 + 1 / len(values))
    return Interval(mean, max(0.0, mean - half), min(most, mean + half), len(values))


def predict_share(values: Sequence[float], count: int) -> Interval:
    """The same of shares, each counted among `count` requests.

    A share of few runs that all say 1 is not certain: two more requests of either outcome are added (Agresti and
    Coull, Am. Stat. 52, 1998), and the deviation is that of independent requests at least.
    """
    total = count * len(values)
    share = (fmean(values) * total + 2) / (total + 4)
    return predict(values, 1.0, math.sqrt(share * (1 - share) / count))
