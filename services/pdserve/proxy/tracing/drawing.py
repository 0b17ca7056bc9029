"""One record becomes the spans of its trace, and these are handed on."""

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.undrawn import Undrawn
from pdserve.runtime.telemetry.span import Export


def draw(ended: Ended, offset_ns: int, export: Export, undrawn: Undrawn) -> int:
    """Draws one and hands it on; returns how many spans that were, 0 where it could not be drawn, which is counted.
    `offset_ns`: what makes the proxy's monotonic clock the epoch's."""
    try:
        spans = spans_of(ended, offset_ns)
        export(spans)
    except Exception as defect:  # noqa: BLE001 - a trace that cannot be drawn must not spoil the others, nor the answer
        undrawn.add(defect, request_id=ended.request_id, trace_id=ended.trace_id)
        return 0
    return len(spans)
