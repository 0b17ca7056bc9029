"""The sink that draws: each record becomes the spans of its trace at once, and these are handed on."""

import structlog

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.spans import spans_of
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry.span import Export

log = structlog.get_logger(__name__)


def draw(ended: Ended, offset_ns: int, export: Export) -> int:
    """Draws one and hands it on; returns how many spans that were. `offset_ns`: what makes the proxy's monotonic clock
    the epoch's."""
    try:
        spans = spans_of(ended, offset_ns)
        export(spans)
    except Exception as defect:  # a trace that cannot be drawn must not spoil the others, nor the answer
        log.error("trace_failed", request_id=ended.request_id, trace_id=ended.trace_id, exc_info=defect)
        return 0
    return len(spans)


class TraceSink:
    """An `ended.Sink` that draws where it is: in a process that nobody waits for, as a simulation is. What a proxy that
    serves has in its place: apart.py."""

    def __init__(self, export: Export, clock: Clock) -> None:
        self._export = export
        self._clock = clock

    def __call__(self, ended: Ended) -> None:
        """Draws it."""
        draw(ended, self._clock.unix_ns() - self._clock.monotonic_ns(), self._export)
