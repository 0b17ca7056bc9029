"""How long fences take: from the stop of an end until nothing of it is in flight. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Fence:
    """One end's fence under way."""

    since: float
    waits: bool
    """Whether an operation was in flight when it began."""
    overdue: bool = False
    """Past its deadline: the sessions that keep it were torn down."""


@dataclass(slots=True)
class FenceCounts:
    """The fences of this daemon so far; for operators."""

    count: int = 0
    """Those that are over."""
    waited: int = 0
    """Of these, the ones that found something in flight."""
    longest: float = 0.0
    total: float = 0.0
    torn_down: int = 0
    """Those that ran past their deadline, also where they are not over yet."""

    def over(self, fence: Fence, now: float) -> None:
        """A fence is done."""
        took = now - fence.since
        self.count += 1
        self.waited += fence.waits
        self.longest = max(self.longest, took)
        self.total += took

    def overdue(self, fence: Fence) -> None:
        """A fence ran past its deadline; counted once."""
        self.torn_down += not fence.overdue
        fence.overdue = True
