"""Where a request, or one attempt of it, was when it ended without a first byte. Pure.

    dispatched   P received            P scheduled?           failed
    |-prefill.hop-|----prefill.queue ... not told ...-----------|
                   the part it ended in; it may have come as far as prefill.forward

The part it ended in is the one whose end was not reached: it begins at the last stamp and lasts until the
failure. Where points after that stamp may have been passed unseen (an engine tells its times only with its
tokens, a killed process nothing at all) it is the first of the parts in question, and the others are named.
Nothing is split among them.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pdserve.proxy import parts
from pdserve.proxy.course import PREFILLS
from pdserve.proxy.ended import Ended, Outcome, Tried
from pdserve.proxy.parts import Chain, Interval, Point
from pdserve.proxy.types import Mode


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The way until the failure."""

    passed: tuple[Interval, ...]
    """What has ended, in order; a part that is empty belongs to nobody."""
    last: Interval
    """The part that it ended in, until the failure."""
    or_later: tuple[str, ...] = ()
    """Parts after it that it may have come to."""
    unstamped: tuple[str, ...] = ()
    """Parts before it whose ends were passed unseen: with what follows them they are nobody's time."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, the last included."""
        return {i.part: (i.end_ns - i.start_ns) / 1e9 for i in (*self.passed, self.last) if i.part}

    @property
    def unattributed(self) -> float:
        """Seconds that belong to nobody; with the parts they are the time to the failure."""
        return sum(i.end_ns - i.start_ns for i in self.passed if not i.part) / 1e9


def way(
    points: Mapping[int, int], unseen: Set[int], path: Chain, start_ns: int, end_ns: int, mode: Mode | None
) -> Unfinished | None:
    """How far along `path` it came between `start_ns` and its failure at `end_ns`. None: all of it, or nobody can say
    that any point was not reached."""
    stop = next((n for n, (point, _) in enumerate(path) if point not in points and point not in unseen), None)
    if stop is None:
        return None
    # In WRITE decode may have passed what lies behind: beside prefill it counts nothing, and says nothing of how far
    # prefill has come.
    beside = parts.BESIDE if mode is Mode.WRITE and unseen & PREFILLS else frozenset[int]()
    first = max((n + 1 for n in range(stop) if path[n][0] in points and path[n][0] not in beside), default=0)
    behind = path[:first]
    passed = parts.intervals(points, behind, start_ns, end_ns, mode)
    since = passed[-1].end_ns if passed else start_ns
    return Unfinished(
        passed=tuple(passed),
        last=Interval(path[first][1], since, max(since, end_ns)),
        or_later=tuple(part for point, part in path[first + 1 : stop + 1] if point not in beside),
        unstamped=tuple(part for point, part in behind if point not in points),
    )


def of_attempt(tried: Tried) -> Unfinished | None:
    """From the moment at which its legs were opened. None where it gave a first byte, or had no legs yet."""
    course = tried.course
    if not tried.reason or course.first_byte_ns or not course.dispatched_ns:
        return None
    path = parts.tail(handed_over=bool(tried.prefill_engine_id))
    return way(
        course.points, course.unseen, path, course.dispatched_ns, max(course.ended_ns, course.dispatched_ns), tried.mode
    )


def of_request(ended: Ended) -> Unfinished | None:
    """From the moment at which it came. None where its client got a first byte, or it ended well."""
    if ended.outcome is Outcome.FINISHED or any(tried.course.first_byte_ns for tried in ended.attempts):
        return None
    last = ended.attempts[-1] if ended.attempts else None
    points, unseen, path = dict(ended.points), frozenset[int](), parts.HEAD
    if len(ended.attempts) > 1 or ended.waited:
        path = (*path, *parts.RETRY)
    if last is None or not last.course.dispatched_ns or ended.waited:
        points.pop(Point.REDISPATCHED, None)  # of an attempt before
    else:
        path = (*path, *parts.tail(handed_over=bool(last.prefill_engine_id)))
        points |= last.course.points
        unseen = last.course.unseen
    return way(points, unseen, path, points[Point.RECEIVED], ended.ended_ns, last.mode if last else None)
