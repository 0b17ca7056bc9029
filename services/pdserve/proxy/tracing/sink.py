"""The sink that traces: takes each request's record, and hands on the spans of those that are kept.

Records are drawn several at a time: code that has just run takes half as long the next time. Between two of
them whatever else is ready runs first, so that nobody waits for more than one.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.verdict import keep
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry.span import Export

log = structlog.get_logger(__name__)

MOST: Final = 8
"""Records that wait before they are drawn, one behind the other."""
PAUSE: Final = 0.1
"""Seconds that a record waits for others, at most."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls something in so many seconds, as a loop's call_later."""


class TraceSink:
    """An `ended.Sink`."""

    def __init__(self, export: Export, clock: Clock, slow: float, later: Later) -> None:
        """`slow`: seconds to the first byte from which on every request is traced; 0: none for that."""
        self._export = export
        self._clock = clock
        self._slow = slow
        self._later = later
        self._waiting: deque[Ended] = deque()
        self._closed = False

    def __call__(self, ended: Ended) -> None:
        """Keeps the record, and begins to draw those that wait when there are enough of them."""
        if not keep(ended, self._slow):
            return
        self._waiting.append(ended)
        if self._closed:
            self._draw()
        elif len(self._waiting) == 1:
            self._later(PAUSE, self._next)
        elif len(self._waiting) == MOST:
            self._later(0, self._next)

    def close(self) -> None:
        """Draws what waits; what comes after is drawn at once. Safe twice."""
        self._closed = True
        while self._waiting:
            self._draw()

    def _next(self) -> None:
        if self._waiting:
            self._draw()
        if self._waiting:
            self._later(0, self._next)

    def _draw(self) -> None:
        ended = self._waiting.popleft()
        try:
            self._export(spans_of(ended, self._clock.unix_ns() - self._clock.monotonic_ns()))
        except Exception as defect:  # a trace that cannot be drawn must not spoil the answer
            log.error("trace_failed", request_id=ended.request_id, trace_id=ended.trace_id, exc_info=defect)
