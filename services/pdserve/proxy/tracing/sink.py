"""The sink that traces: takes each request's record, and hands on the spans of those that are kept."""

import structlog

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.verdict import keep
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry.span import Export

log = structlog.get_logger(__name__)


class TraceSink:
    """An `ended.Sink`."""

    def __init__(self, export: Export, clock: Clock, slow: float) -> None:
        """`slow`: seconds to the first byte from which on every request is traced; 0: none for that."""
        self._export = export
        self._clock = clock
        self._slow = slow

    def __call__(self, ended: Ended) -> None:
        """Costs some tens of microseconds for each span."""
        if not keep(ended, self._slow):
            return
        try:
            self._export(spans_of(ended, self._clock.unix_ns() - self._clock.monotonic_ns()))
        except Exception as defect:  # a trace that cannot be drawn must not spoil the answer
            log.error("trace_failed", request_id=ended.request_id, trace_id=ended.trace_id, exc_info=defect)
