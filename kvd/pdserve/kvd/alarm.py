"""The daemon's one timer, and how it notices that it stood still."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)


class Waits(Protocol):
    """Somebody with deadlines."""

    def next_deadline(self) -> float | None:
        """Monotonic seconds; None: nothing is waited for."""
        ...


class Alarm:
    """Rings at the earliest deadline."""

    def __init__(
        self,
        now: Callable[[], float],
        lease: float,
        waits: Sequence[Waits],
        *,
        ring: Callable[[], None],
        stood_still: Callable[[float], None],
    ) -> None:
        """`now`: monotonic seconds; `lease`: seconds; `stood_still`: moves every deadline by so many seconds."""
        self._now = now
        self._lease = lease
        self._waits = tuple(waits)
        self._ring = ring
        self._stood_still = stood_still
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        self._heard_at = now()
        """When anything happened last."""

    def heard(self) -> float:
        """The time for what has just come in, which must not get a deadline before a standstill has moved those that
        are there: a timer that is very late says that this process was stopped, or its host was."""
        now, before = self._now(), self._heard_at
        self._heard_at = now
        late = now - self._at
        if self._timer is not None and late > self._lease / 3:
            seconds = min(now - before, late + self._lease)
            log.warning("stood_still", seconds=round(seconds, 3))
            self._stood_still(seconds)
            self._at += seconds  # what it was set for, too; the loop calls it all the same, and it is set again
        return now

    def set(self) -> None:
        """To the earliest deadline that there is now."""
        times = [due for waits in self._waits if (due := waits.next_deadline()) is not None]
        if not times:
            return
        due = min(times)
        if self._timer is not None and self._at <= due:
            return
        self.close()
        self._at = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._now()), self._ring)

    def rang(self) -> None:
        """It has rung, and has to be set again."""
        self._timer = None

    def close(self) -> None:
        """Rings no more until it is set. Safe twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
