"""What steps and gaps say: the arithmetic of the engine's benchmark, and nothing else.

A gap is the time in seconds from one token of a stream to the next; beside gaps, a step is the
median one.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

Gaps = Sequence[float]


def gaps_between(times: Sequence[float]) -> list[float]:
    """The gaps of a stream whose tokens came at `times`.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(times) < 2:
        raise ValueError(f"{len(times)} tokens have no gap between them")
    return [later - earlier for earlier, later in pairwise(times)]


class Took(msgspec.Struct, frozen=True):
    """What one step took, in seconds."""

    wall: float
    cpu: float
    """Of the thread that runs the steps."""


class Block(msgspec.Struct, frozen=True):
    """What the counted steps of one block took, with the connector and without: neighbours in time."""

    attached: tuple[Took, ...]
    detached: tuple[Took, ...]


_TURNS: Final = (True, False, False, True)
"""Whether the connector is attached in each turn of a block. A drift over the block, as of a context
that grows, falls on both sides alike."""
_TURN: Final = 4
"""Steps of a turn; the first one, which finds the other side's code in the caches, does not count."""


class Pattern:
    """Tells an engine's core when to attach its connector, and gathers what its steps took.

    In this order, for each step: `end` of the step before, `attached_next`, `begin`. A block is
    complete only of decode steps that follow each other.
    """

    def __init__(self) -> None:
        self._taken: list[Took] = []
        self._began: Took | None = None
        self._decoding = False

    def end(self, wall: float, cpu: float) -> Block | None:
        """The running step has ended by these clocks; the block, if it was its last."""
        if self._began is None or not self._decoding:
            return None
        self._taken.append(Took(wall - self._began.wall, cpu - self._began.cpu))
        if len(self._taken) < len(_TURNS) * _TURN:
            return None
        sides: dict[bool, list[Took]] = {True: [], False: []}
        for index, took in enumerate(self._taken):
            if index % _TURN:
                sides[_TURNS[index // _TURN]].append(took)
        self._taken.clear()
        return Block(tuple(sides[True]), tuple(sides[False]))

    def attached_next(self, decoding: bool) -> bool:
        """Whether the step that comes, a decode step or another, runs with the connector."""
        self._decoding = decoding
        if not decoding:
            self._taken.clear()
        return not decoding or _TURNS[len(self._taken) // _TURN]

    def begin(self, wall: float, cpu: float) -> None:
        """The step begins by these clocks."""
        self._began = Took(wall, cpu)


@dataclass(frozen=True, slots=True)
class Share:
    """What the connector adds to a step, in percent of a step without it."""

    percent: float
    """The median over blocks of the ratio of medians."""
    error: float
    """Standard error of `percent`; from the blocks' quartiles, which an outlier does not move."""

    @classmethod
    def of(cls, blocks: Sequence[Block], clock: Callable[[Took], float]) -> "Share":
        """Raises ValueError for fewer than two blocks, of which nothing is known."""
        if len(blocks) < 2:
            raise ValueError(f"{len(blocks)} blocks of steps are no measurement")
        ratios = [_median(block.attached, clock) / _median(block.detached, clock) for block in blocks]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        # Of a normal spread the quartiles are 1.349 standard deviations apart, and the median of
        # n values is 1.253 standard errors of their mean uncertain.
        return cls((middle - 1) * 100, (high - low) / 1.349 * 1.253 / len(ratios) ** 0.5 * 100)


@dataclass(frozen=True, slots=True)
class Idle:
    """A step of an engine with a connector that has nothing to do, against one without."""

    wall: Share
    cpu: Share
    by_start: tuple[float, ...]
    """`wall.percent` of each start of the engine."""
    step_s: float
    """Median of the steps without."""

    @classmethod
    def of(cls, starts: Sequence[Sequence[Block]]) -> "Idle":
        """The blocks of each start.

        Raises:
            ValueError: a start has too few.
        """
        by_start = tuple(Share.of(blocks, _wall).percent for blocks in starts)
        every = [block for blocks in starts for block in blocks]
        return cls(
            wall=Share.of(every, _wall),
            cpu=Share.of(every, _cpu),
            by_start=by_start,
            step_s=statistics.median(took.wall for block in every for took in block.detached),
        )


def _wall(took: Took) -> float:
    return took.wall


def _cpu(took: Took) -> float:
    return took.cpu


def _median(steps: Sequence[Took], clock: Callable[[Took], float]) -> float:
    return statistics.median(map(clock, steps))


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
        # The median is 0 where most tokens were read in one go, by a reader that had no core.
        step = statistics.median(windows.quiet) or statistics.fmean(windows.quiet)
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
