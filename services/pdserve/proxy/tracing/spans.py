"""A request's record becomes the spans of its trace. Pure.

    request ── tokenize ─ admit ─ route ─ attempt 1 ────────── attempt 2 ─────── ... ─ decode.stream
                                          ends with its        from there to its
                                          failure, or its      own first byte
                                          first byte
    attempt ── prefill.hop ─ prefill.queue ─ prefill.forward ─ proxy.serialization ─ ... ─ egress
               one that failed before its first byte ends with the part that it failed in

Parts are drawn where their stamps are; kvd's work lies below kv.wait, and what it had pushed before
(WRITE) below prefill.forward. An answer that another pair took up goes on as the next attempt, behind
the stream that broke off.
"""

from pdserve.proxy import parts, unfinished
from pdserve.proxy.ended import Ended, Tried
from pdserve.proxy.parts import Point, Skew
from pdserve.proxy.tracing import figures
from pdserve.proxy.tracing.draft import Draft, render
from pdserve.proxy.tracing.kvd import Hang, hang
from pdserve.proxy.tracing.layout import SHORTEST_NS, Window
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import WELL, Kind, Service, Span, SpanEvent, Status, Value

_PROXY = Service(names.PROXY)


def spans_of(ended: Ended, offset_ns: int) -> list[Span]:
    """The root first. `offset_ns`: what makes the proxy's monotonic clock the epoch's."""
    received = ended.points[Point.RECEIVED]
    root = Draft(
        span_id=ended.trace.span_id,
        name=names.REQUEST,
        service=_PROXY,
        window=Window(received, max(ended.ended_ns, received + SHORTEST_NS)),
        kind=Kind.SERVER,
        attributes=figures.of_request(ended),
        status=_status(ended.reason, ended.error),
    )
    if (first_byte := ended.points.get(Point.FIRST_BYTE_WRITTEN)) is not None and figures.giver(ended):
        root.events.append(SpanEvent(names.FIRST_TOKEN_EVENT, first_byte))
    root.children += _head(ended)
    at = root.children[-1].window.end_ns if root.children else received
    for number, tried in enumerate(ended.attempts, 1):
        if not _made(tried):
            continue
        attempt = _attempt(ended, tried, number, at)
        stream = _stream(ended, tried, number, attempt.window.end_ns)
        root.children += [attempt, stream]
        at = max(stream.window.end_ns, attempt.window.end_ns, tried.course.ended_ns if tried.reason else 0)
    way = unfinished.of_request(ended)
    if way is not None and way.last.part == names.RETRY:  # other engines were waited for, and did not come
        root.children.append(_failed(ended, "again", "admit", _PROXY, Window(at, max(at, ended.ended_ns))))
    return render(root, ended.trace.trace_id, ended.trace.parent_id, offset_ns)


def _status(reason: str, message: str) -> Status:
    return Status(True, f"{reason}: {message}" if message else reason) if reason else WELL


def _head(ended: Ended) -> list[Draft]:
    """What came before the first attempt; where none was made, the last of it is where the request ended."""
    points = ended.points
    way = None if any(map(_made, ended.attempts)) else unfinished.of_request(ended)
    cut = way.passed if way else parts.intervals(points, parts.HEAD, points[Point.RECEIVED], ended.ended_ns, None)
    found = [_part(ended, "", i.part, _PROXY, Window(i.start_ns, i.end_ns)) for i in cut if i.part]
    if way is not None:
        last = way.last
        found.append(_failed(ended, "", last.part, _PROXY, Window(last.start_ns, last.end_ns)))
    return found


def _made(tried: Tried) -> bool:
    """Whether its legs were opened. Else its engines had been chosen, and the request ended there."""
    return bool(tried.course.dispatched_ns)


def _attempt(ended: Ended, tried: Tried, number: int, after_ns: int) -> Draft:
    course, handed_over = tried.course, bool(tried.prefill_engine_id)
    start = after_ns if number > 1 else max(after_ns, course.dispatched_ns or course.began_ns)
    end = max(start, course.first_byte_ns or course.ended_ns)
    said: dict[str, Value] = {
        names.ATTEMPT_NUMBER: number,
        names.ATTEMPT_TOKENS: tried.tokens,
        names.MODE: tried.mode.value if tried.mode else "none",
        names.DECODE_ENGINE: tried.decode_engine_id,
    }
    if handed_over:
        said |= {names.PREFILL_ENGINE: tried.prefill_engine_id, names.TRANSFER_ID: tried.transfer_id}
    if tried.reason:
        said[names.ERROR_TYPE] = tried.reason
    if tried.blamed:
        said[names.BLAMED] = tried.blamed
    attempt = Draft(
        span_id=ended.trace.attempt_id(number),
        name=names.ATTEMPT,
        service=_PROXY,
        window=Window(start, end),
        kind=Kind.CLIENT,
        attributes=said,
        status=_status(tried.reason, tried.error),
    )
    dispatched = max(start, course.dispatched_ns)
    key = f"attempt {number}"
    if number > 1:  # the next pair was waited for
        attempt.children.append(_part(ended, key, "admit", _PROXY, Window(start, dispatched)))
    points = dict(course.points)
    if course.first_byte_ns:
        points[Point.FIRST_BYTE_WRITTEN] = course.first_byte_ns
    way = unfinished.of_attempt(tried)
    path = parts.tail(handed_over=handed_over)
    cut = way.passed if way else parts.intervals(points, path, dispatched, end, tried.mode)
    hangs = Hang(ended.trace, key, tried)
    for interval in cut:
        if interval.part:
            drawn = Window(interval.start_ns, interval.end_ns)
            part = _part(ended, key, interval.part, _service(interval.part, tried), drawn)
            part.attributes |= _clock(interval.part, tried)
            attempt.children.append(hang(hangs, interval.part, part))
    if way is not None:
        last = way.last
        broken = _part(ended, key, last.part, _service(last.part, tried), Window(last.start_ns, last.end_ns))
        broken.attributes |= _clock(last.part, tried) | figures.of_doubt(way)
        broken.status = attempt.status
        attempt.attributes |= figures.of_failure(way)
        attempt.children.append(hang(hangs, last.part, broken))
    return attempt


def _stream(ended: Ended, tried: Tried, number: int, start_ns: int) -> Draft:
    """Nothing is drawn of it where the attempt gave nothing, or but one token."""
    course = tried.course
    end = course.ended_ns if tried.reason else course.last_token_ns
    stream = Draft(
        span_id=ended.trace.child_id("stream", str(number)),
        name=names.STREAM,
        service=Service(names.DECODE, tried.decode_engine_id),
        window=Window(start_ns, max(start_ns, end) if course.first_byte_ns else start_ns),
        attributes={names.ATTEMPT_NUMBER: number, names.ATTEMPT_TOKENS: tried.tokens},
        status=_status(tried.reason, tried.error),
    )
    if figures.giver(ended) is tried:
        stream.events.append(SpanEvent(names.FIRST_TOKEN_EVENT, start_ns))
    return stream


def _part(ended: Ended, key: str, part: str, service: Service, window: Window) -> Draft:
    return Draft(ended.trace.child_id(key, part), names.part_span(part), service, window)


def _failed(ended: Ended, key: str, part: str, service: Service, window: Window) -> Draft:
    """The part in which the request ended."""
    drawn = _part(ended, key, part, service, window)
    drawn.status = _status(ended.reason, ended.error)
    return drawn


def _service(part: str, tried: Tried) -> Service:
    name = names.PARTS[part]
    instances = {names.PREFILL: tried.prefill_engine_id, names.DECODE: tried.decode_engine_id}
    return Service(name, instances.get(name, ""))


def _clock(part: str, tried: Tried) -> dict[str, Value]:
    """Where a part's stamps are another host's: how its clock was set."""
    clocks = {names.PREFILL: tried.course.prefill_clock, names.DECODE: tried.course.decode_clock}
    skew = clocks.get(names.PARTS[part], parts.SAME_CLOCK)
    return {} if skew == parts.SAME_CLOCK else _said(skew)


def _said(skew: Skew) -> dict[str, Value]:
    return {names.CLOCK_OFFSET: skew.offset_ns / 1e9, names.CLOCK_UNCERTAINTY: skew.uncertainty_ns / 1e9}
