"""What the scheduler's half is given: a way to kvd, and a clock."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.kvd.client.messages import End, Request


class SchedulerLink(Protocol):
    """A scheduler's way to kvd; `kvd.client`'s attachments are such."""

    def send(self, message: Request) -> None:
        """Sends in order and never blocks; while kvd is away the message waits or is answered by
        an end with KVD_UNAVAILABLE."""
        ...

    def drain_ends(self) -> Sequence[End]:
        """The ends since the last call; exactly one for each handle that was sent."""
        ...


class MonotonicNs(Protocol):
    """The part of `runtime.clock.Clock` that is needed here."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        ...
