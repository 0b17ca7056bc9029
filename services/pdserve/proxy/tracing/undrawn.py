"""Records of which no trace can be drawn: a defect of ours each, counted, and said once in a while."""

import math
from typing import Any, Final

import structlog

from pdserve.runtime.clock import Clock

log = structlog.get_logger(__name__)

SAID_EVERY_S: Final = 10.0
"""Seconds from one line to the next, however many there are: a defect mostly strikes every request."""


class Undrawn:
    """Counts them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = -math.inf
        self.count = 0
        """Since the start."""

    def add(self, defect: Exception, **about: Any) -> None:
        """One more. `about`: ids of the request, as far as they are known."""
        self.count += 1
        now = self._clock.monotonic()
        if now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            log.error("trace_failed", undrawn=self.count, exc_info=defect, **about)
