"""Which requests are traced, decided at their end. Pure."""

from pdserve.proxy.ended import Ended, Outcome, Sink
from pdserve.proxy.parts import Point


def keep(ended: Ended, slow: float) -> bool:
    """Those that were chosen when they came (by the caller, else by their trace's id), and always those
    that failed, were tried elsewhere, or had waited more than `slow` seconds for their first byte; 0:
    however slow."""
    if ended.trace.sampled or ended.outcome is Outcome.FAILED:
        return True
    if ended.fallbacks or ended.continuations or len(ended.attempts) > 1:
        return True
    waited = ended.points.get(Point.FIRST_BYTE_WRITTEN, ended.ended_ns) - ended.points[Point.RECEIVED]
    return 0 < slow < waited / 1e9


def kept(sink: Sink, slow: float) -> Sink:
    """A sink that hands on the records that `keep` keeps: the others cost nothing more."""

    def hand_on(ended: Ended) -> None:
        if keep(ended, slow):
            sink(ended)

    return hand_on
