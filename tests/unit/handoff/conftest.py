"""A link that records, and shorthands."""

import pytest

from pdserve.engine.handoff.scheduler import SchedulerHandoff
from pdserve.kvd.client.messages import End, Request


class RecordingLink:
    """A SchedulerLink whose messages and ends are lists."""

    def __init__(self) -> None:
        self.sent: list[Request] = []
        self.ends: list[End] = []

    def send(self, message: Request) -> None:
        self.sent.append(message)

    def drain_ends(self) -> list[End]:
        ends, self.ends = self.ends, []
        return ends

    def take(self) -> list[Request]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


class FixedClock:
    """Always 7 ns."""

    def monotonic_ns(self) -> int:
        return 7


@pytest.fixture
def link() -> RecordingLink:
    """A fresh link."""
    return RecordingLink()


@pytest.fixture
def handoff(link: RecordingLink) -> SchedulerHandoff:
    """Blocks of 4 tokens."""
    return SchedulerHandoff(link, 4, FixedClock())
