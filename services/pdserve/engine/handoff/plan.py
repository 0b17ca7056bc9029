"""What passes between an engine's scheduler, the hand-over and the workers in one step. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.kvd.notices import Chunk


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """What one step computes of one request."""

    handle: str
    block_ids: Sequence[int]
    """All of the request's blocks, in order."""
    computed_before: int
    """Tokens whose KV is there before the step (the first time: the local prefix hit)."""
    new_tokens: int


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that must not be read any more before the step may write."""

    handle: str
    attempt: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What the workers do in one step; the same for every rank."""

    step: int
    chunks: tuple[Chunk, ...] = ()
    """WRITE producers' chunks to be announced."""
    fences: tuple[Fence, ...] = ()
    """Preempted attempts to be fenced before the step writes."""
    sent: tuple[str, ...] = ()
    """Held producers whose blocks may be freed."""
    received: tuple[str, ...] = ()
    """Consumers whose hand-over is over."""
    failed: tuple[str, ...] = ()
    """Those of `received` that must compute the prompt themselves."""
    waiting: int = 0
    """Handles that still wait for their end: an engine without other work may sleep on these."""

    @property
    def empty(self) -> bool:
        """Whether the workers have nothing to do."""
        return not (self.chunks or self.fences or self.sent or self.received)
