"""Traces that are drawn in the process that serves, as soon as a request ends: a test need not wait for another one."""

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.drawing import draw
from pdserve.proxy.tracing.undrawn import Undrawn
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry.span import Export


class TraceSink:
    """An `ended.Sink` in the place of `tracing.relief`, which draws in a process of its own."""

    def __init__(self, export: Export, clock: Clock) -> None:
        self._export = export
        self._clock = clock
        self._undrawn = Undrawn(clock)

    def __call__(self, ended: Ended) -> None:
        """Draws it."""
        draw(ended, self._clock.unix_ns() - self._clock.monotonic_ns(), self._export, self._undrawn)
