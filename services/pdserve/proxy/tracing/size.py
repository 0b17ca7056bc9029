"""How many spans a record has, without drawing it: for the count of those that never were. Pure."""

from pdserve.proxy import parts
from pdserve.proxy.ended import Ended, Tried
from pdserve.proxy.tracing.layout import SHORTEST_NS


def most_spans(ended: Ended) -> int:
    """At most so many; as many where each part is long enough to be drawn beside its neighbours."""
    head = sum(point in ended.points for point, _ in parts.HEAD)
    found = 1 + head + sum(_of_attempt(tried) for tried in ended.attempts)
    if ended.reason and not any(tried.course.first_byte_ns for tried in ended.attempts):
        found += 1  # the part that it ended in
    return found + max(0, len(ended.attempts) - 1)  # each wait for another pair


def _of_attempt(tried: Tried) -> int:
    """Its own; its parts, with the one that it ended in, or else with the one that its first byte ends and the stream;
    three of kvd's, since what was pushed had not to be resolved."""
    course = tried.course
    if not course.dispatched_ns:
        return 0
    found, latest = 1 + (2 if course.first_byte_ns else 1), course.dispatched_ns
    for point, _ in parts.tail(handed_over=bool(tried.prefill_engine_id)):
        at = course.points.get(point, 0)
        if at - latest >= SHORTEST_NS:  # else something longer hides it
            found, latest = found + 1, at
    return found + (3 if course.facts is not None else 0)
