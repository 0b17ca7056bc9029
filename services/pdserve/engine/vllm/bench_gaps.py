"""What the gaps between tokens say: the arithmetic of the engine's benchmark, and nothing else.

A gap is the time in seconds from one token of a stream to the next; a step is the median gap.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Gaps = Sequence[float]


def gaps_between(times: Sequence[float]) -> list[float]:
    """The gaps of a stream whose tokens came at `times`.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(times) < 2:
        raise ValueError(f"{len(times)} tokens have no gap between them")
    return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Turn:
    """Two runs next to each other in time, on the same core."""

    ours: Gaps
    """Of the engine with the connector."""
    plain: Gaps
    """Of the engine without."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A step of an engine with a connector that has nothing to do, against one without."""

    ours_s: float
    """Median of all gaps."""
    plain_s: float
    by_start: tuple[float, ...]
    """Ratio of the medians of each start of the two engines."""

    @classmethod
    def of(cls, starts: Sequence[Sequence[Turn]]) -> "Idle":
        """The turns of each start.

        Raises:
            ValueError: nothing was measured.
        """
        ours, plain = _medians([turn for start in starts for turn in start])
        return cls(ours, plain, tuple(one / other for one, other in map(_medians, starts)))

    @property
    def percent(self) -> float:
        """What the connector adds to a step, of the step without: the geometric mean over starts.

        Two processes of one program differ for all their life by where their memory fell. Each start
        weighs the same, so that this averages out however long each was measured.
        """
        return (statistics.geometric_mean(self.by_start) - 1) * 100

    @property
    def error_percent(self) -> float:
        """Standard error of `percent`; 0 for a single start, of which nothing is known."""
        count = len(self.by_start)
        return statistics.stdev(self.by_start) / count**0.5 * 100 if count > 1 else 0.0


def _medians(turns: Sequence[Turn]) -> tuple[float, float]:
    if not turns:
        raise ValueError("nothing was measured")
    ours = statistics.median(gap for turn in turns for gap in turn.ours)
    return ours, statistics.median(gap for turn in turns for gap in turn.plain)


@dataclass(frozen=True, slots=True)
class Windows:
    """One round: the gaps of one stream in three stretches of its life."""

    quiet: Gaps
    """The stream alone."""
    landing: Gaps
    """Requests join one after the other, and each one's prompt is handed over."""
    local: Gaps
    """The same requests join, and their prompts are in the engine's own prefix cache: the same
    compute without a hand-over."""
    requests: int
    """How many joined in each of the last two."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A round's largest gaps, in steps of the stream alone. What a joining request computes is
    taken off the gaps of the two windows in which requests join."""

    step_s: float
    """The stream alone."""
    joining_s: float
    """What a joining request adds to the step that computes it."""
    largest_s: float
    """While prompts landed, nothing taken off."""
    landing: float
    local: float
    quiet: float

    @classmethod
    def of(cls, windows: Windows) -> "Landing":
        """Each request was computed in one step: the longest of `local`'s gaps, as many as there
        were requests, are theirs."""
        step = statistics.median(windows.quiet)
        joined = sorted(windows.local)[-windows.requests :]
        joining = max(0.0, statistics.median(joined) - step)
        return cls(
            step_s=step,
            joining_s=joining,
            largest_s=max(windows.landing),
            landing=(max(windows.landing) - joining) / step,
            local=(max(windows.local) - joining) / step,
            quiet=max(windows.quiet) / step,
        )
