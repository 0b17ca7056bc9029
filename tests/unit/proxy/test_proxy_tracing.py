"""A record becomes its trace: which spans, where they lie, which numbers; and which requests are kept.

Two golden files hold the whole trace of a READ and of a WRITE; those of requests that failed:
test_proxy_unfinished.py.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pdserve.proxy import parts
from pdserve.proxy.course import Course, on_our_clock
from pdserve.proxy.ended import Ended, Outcome, Tried
from pdserve.proxy.parts import Point, Skew
from pdserve.proxy.testing import TraceSink
from pdserve.proxy.trace import accept, in_share
from pdserve.proxy.tracing.figures import formula
from pdserve.proxy.tracing.layout import GAP_NS, SHORTEST_NS, Window, fit
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.tracing.verdict import keep, kept
from pdserve.proxy.types import Mode, Stamps, TransferFacts
from pdserve.runtime.telemetry import names
from tests.unit.proxy.apart_rig import At
from tests.unit.proxy.records import FACTS, HEAD, LEGS, MS, OFFSET, TRACE, compare, drawn, record

# -- the golden traces --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_the_trace_of_a_request(mode: Mode) -> None:
    """Names, services, ids, times, attributes, events and links are those of the golden file, and nothing else."""
    compare(record(mode), mode.value)


# -- where spans lie ----------------------------------------------------------------------------

LEG_POINTS = sorted(LEGS[Mode.READ])
stamps = st.dictionaries(st.sampled_from(LEG_POINTS), st.integers(-50_000, 2_000_000))


@st.composite
def records(draw: st.DrawFn) -> Ended:
    """Any order of any stamps, some missing, some before the request or after its end, over one to three attempts."""
    at = 0
    head: dict[int, int] = {Point.RECEIVED: 0}
    for point in (Point.TOKENIZED, Point.ADMITTED):
        at += draw(st.integers(0, 300_000))
        head[point] = at
    attempts: list[Tried] = []
    points: dict[int, int] = dict(head)
    told = False
    for number in range(draw(st.integers(0, 3))):
        began = at
        at += draw(st.integers(0, 300_000))
        dispatched = at
        if not told:
            points[Point.REDISPATCHED if number else Point.ROUTED] = dispatched
        legs = {point: dispatched + after for point, after in draw(stamps).items()}
        first = last = 0
        if draw(st.booleans()):
            at += draw(st.integers(0, 1_500_000))
            first = at
            last = draw(st.integers(dispatched, first + 400_000))
            if not told:
                points |= {**legs, Point.FIRST_BYTE_WRITTEN: first}
                told = True
        at = max(at, last) + draw(st.integers(0, 300_000))
        facts = draw(
            st.one_of(st.none(), st.builds(_facts, st.lists(st.integers(0, 3_000_000), min_size=4, max_size=4)))
        )
        split = draw(st.booleans())
        unseen = frozenset(draw(st.sets(st.sampled_from(LEG_POINTS))))
        course = Course(began, dispatched, first, last, at, legs, unseen, facts=facts if split else None)
        mode = draw(st.sampled_from(list(Mode))) if split else None
        reason = draw(st.sampled_from(["", "ENGINE_DIED"]))
        attempts.append(Tried("p" if split else "", "d", "ab" * 16 if split else "", mode, 1, reason, course=course))
    outcome = draw(st.sampled_from(list(Outcome)))
    at += draw(st.integers(0, 300_000))
    reason = "" if outcome is Outcome.FINISHED else "CANCELLED"
    return record(
        points=points, attempts=tuple(attempts), ended_ns=at, outcome=outcome, reason=reason, finished=None
    )  # fmt: skip


def _facts(times: list[int]) -> TransferFacts:
    first, landed, last, accepted = times
    return TransferFacts(100, 1, 1, 1, 5, "shm", first, landed, 0, 0, accepted, last)


@given(records())
def test_whatever_was_stamped_is_a_trace(record: Ended) -> None:
    """Siblings leave 2 us, no child outlives its parent, parts sum to TTFT, or to the time to the failure, to the
    nanosecond: see `check`."""
    drawn(record)


@given(st.lists(st.integers(0, 10_000), max_size=12), st.integers(0, 30_000))
def test_what_is_drawn_leaves_gaps(lengths: list[int], end: int) -> None:
    """Each inside what was measured and inside the parent; what has room is drawn."""
    edges = list(itertools.accumulate(lengths, initial=0))
    children = [Window(a, b) for a, b in itertools.pairwise(edges)]
    fitted = fit(children, Window(0, end))
    kept = [window for window in fitted if window is not None]
    for earlier, later in itertools.pairwise(kept):
        assert later.start_ns - earlier.end_ns >= GAP_NS
    for child, window in zip(children, fitted, strict=True):
        if window is None:
            assert min(child.end_ns, end) - child.start_ns < GAP_NS + SHORTEST_NS
        else:
            assert child.start_ns == window.start_ns < window.end_ns <= min(child.end_ns, end)


# -- numbers ------------------------------------------------------------------------------------


def test_the_formulas() -> None:
    """READ's terms sum to what followed the choice of engines; WRITE takes the longer of both sides."""
    read, write = (drawn(record(mode))[0].attributes for mode in (Mode.READ, Mode.WRITE))
    ttft = read[names.TTFT]
    assert isinstance(ttft, float)
    assert read[names.FORMULA_READ] == pytest.approx(ttft - 0.004)
    # queue(P) 10 + forward 40 + write 3, against decode's 4 + 2; and then 10 + 1 + 2 + 2 + 1
    assert write[names.FORMULA_WRITE] == pytest.approx(0.053 + 0.016)
    assert write[names.raw("proxy.serialization")] == pytest.approx(-0.051)
    raw = {name.removeprefix("pdserve.raw."): float(str(value)) for name, value in write.items() if "raw." in name}
    assert set(raw) == set(names.RAW)
    assert formula({**raw, "decode.admit": 1.0}, Mode.WRITE)[names.FORMULA_WRITE] == pytest.approx(1.002 + 0.016)
    del raw["write"]
    assert formula(raw, Mode.WRITE) == {}


def test_bytes_that_were_there_before_the_offer() -> None:
    """Where all of them were, what is left of the wait is kvd's word on its way, and no copy."""
    facts = replace(FACTS[Mode.WRITE], overlapped_bytes=8192, last_byte_ns=50 * MS)
    whole = record(Mode.WRITE)
    tried = whole.attempts[0]
    spans = drawn(replace(whole, attempts=(replace(tried, course=replace(tried.course, facts=facts)),)))
    push, notify = [span for span in spans if span.service.name == names.KVD]
    assert (push.name, notify.name) == (names.KVD_PUSH, names.KVD_NOTIFY)
    assert (push.end_ns - OFFSET, notify.start_ns - OFFSET) == (50 * MS, 56 * MS)
    assert spans[0].attributes[names.raw("write")] == pytest.approx(-0.006)


def test_another_hosts_clock() -> None:
    """Its stamps are set so that both ways take equally long; how sure that is stands on its spans."""
    taken = Stamps("elsewhere", {7: 1000_000, 8: 1000_600})
    skew = parts.skew(taken, "here", 100, 1_100)
    assert skew == Skew(999_700, 200)
    assert parts.shifted(taken, skew) == {7: 300, 8: 900}
    assert on_our_clock(TransferFacts(landed_ns=1000_600), skew).landed_ns == 900
    assert on_our_clock(TransferFacts(), skew).landed_ns == 0
    whole = record()
    tried = whole.attempts[0]
    spans = drawn(replace(whole, attempts=(replace(tried, course=replace(tried.course, decode_clock=skew)),)))
    marked = {span.name for span in spans if names.CLOCK_UNCERTAINTY in span.attributes}
    of_decode = {names.part_span(part) for part, service in names.PARTS.items() if service == names.DECODE}
    assert marked == of_decode & {span.name for span in spans}


def test_an_engine_alone() -> None:
    """Has its own way there in place of a hand-over's six parts; no transfer, no formula, mode none."""
    legs = {point: at for point, at in LEGS[Mode.READ].items() if point >= Point.DECODE_SCHEDULED}
    legs[Point.DECODE_RECEIVED] = 5 * MS
    points = HEAD | legs | {Point.FIRST_BYTE_WRITTEN: 96 * MS}
    course = Course(3 * MS, 4 * MS, 96 * MS, 120 * MS, 121 * MS, legs)
    alone = record(attempts=(Tried("", "d", "", None, 4, course=course),), points=points, finished=None)
    spans = drawn(alone)
    root, attempt = spans[0], spans[4]
    below = [span.name.removeprefix("pdserve.") for span in spans if span.parent_id == attempt.span_id]
    assert below == ["decode.hop", "decode.queue", "decode.first_step", "detokenize", "encode", "egress"]
    assert root.attributes[names.MODE] == attempt.attributes[names.MODE] == "none"
    assert root.attributes[names.UNATTRIBUTED] == 0
    assert not {names.FORMULA_READ, names.FORMULA_WRITE, names.RDMA_WAIT, names.KV_BYTES} & set(root.attributes)
    assert names.TRANSFER_ID not in attempt.attributes


def test_where_no_engine_was_got() -> None:
    """A request that failed while it waited for credits has that wait to its end, with the cause."""
    failed = record(
        points={Point.RECEIVED: 0, Point.TOKENIZED: 1 * MS}, attempts=(), finished=None, ended_ns=50 * MS,
        outcome=Outcome.FAILED, reason="OVERLOADED", error="no room", finish_reasons=(), completion_tokens=0,
    )  # fmt: skip
    root, tokenize, admit = drawn(failed)
    assert (tokenize.name, admit.name) == ("pdserve.tokenize", "pdserve.admit")
    assert admit.end_ns == root.end_ns == OFFSET + 50 * MS
    assert admit.status == root.status
    assert admit.status.message == "OVERLOADED: no room"
    assert names.TTFT not in root.attributes


# -- which are kept -----------------------------------------------------------------------------

UNSAMPLED = replace(TRACE, sampled=False)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"trace": UNSAMPLED}, False),
        ({"trace": UNSAMPLED, "outcome": Outcome.CANCELLED}, False),
        ({"trace": UNSAMPLED, "outcome": Outcome.FAILED}, True),
        ({"trace": UNSAMPLED, "fallbacks": 1}, True),
        ({"trace": UNSAMPLED, "continuations": 1}, True),
        ({"trace": UNSAMPLED, "attempts": record().attempts * 2}, True),
        ({"trace": UNSAMPLED, "points": {**HEAD, Point.FIRST_BYTE_WRITTEN: 1_001 * MS}}, True),
        ({"trace": UNSAMPLED, "points": {**HEAD, Point.FIRST_BYTE_WRITTEN: 999 * MS}}, False),
        ({"trace": UNSAMPLED, "points": HEAD, "ended_ns": 1_001 * MS}, True),
    ],
)
def test_what_is_kept(changes: dict[str, Any], kept: bool) -> None:
    """What was chosen at the start; what failed, went elsewhere or was slow (here 1 s) in any case."""
    assert keep(record(**changes), 1.0) is kept


def test_never_for_being_slow() -> None:
    """0 switches that off."""
    assert not keep(record(trace=UNSAMPLED, points={**HEAD, Point.FIRST_BYTE_WRITTEN: 10**15}), 0.0)


def test_the_share_of_new_traces() -> None:
    """By the id's last 64 bits, the same in every process; a caller's own decision stands."""
    assert not in_share("f" * 32, 0.999)
    assert in_share("f" * 32, 1.0)
    assert not in_share("0" * 32, 0.0)
    assert in_share("f" * 16 + "0" * 15 + "1", 0.0001)
    ids = (int.to_bytes(number * 0x9E3779B97F4A7C15 % 2**64, 16, "big") for number in range(1, 10_001))
    chosen = sum(
        accept("", lambda size: next(ids) if size == 16 else bytes(7) + b"1", 0.1).sampled for _ in range(10_000)
    )
    assert 900 < chosen < 1100
    header = f"00-{TRACE.trace_id}-{TRACE.parent_id}-"
    assert accept(header + "01", bytes, 0.0).sampled
    assert not accept(header + "00", bytes, 1.0).sampled


def test_the_legs_hear_of_their_attempt() -> None:
    """Each attempt has a span id of its own, which its legs get for a parent, with the flag as decided."""
    first, second = TRACE.attempt_id(1), TRACE.attempt_id(2)
    assert len({first, second, TRACE.span_id}) == 3
    assert TRACE.below(first) == f"00-{TRACE.trace_id}-{first}-01"
    assert replace(TRACE, sampled=False).below(first).endswith("-00")
    assert drawn(record())[4].span_id == first


# -- the sink -----------------------------------------------------------------------------------


def test_the_sink_hands_on_what_is_kept() -> None:
    """On the epoch's clock; nothing of the others."""
    got: list[Any] = []
    sink = kept(TraceSink(got.append, At()), 10.0)
    sink(record(trace=UNSAMPLED))
    sink(record())
    assert got == [spans_of(record(), OFFSET)]


def test_a_trace_that_cannot_be_drawn_spoils_no_answer() -> None:
    """The defect is logged with the request's ids, and the sink does not raise; the next one is
    drawn."""
    got: list[Any] = []
    with capture_logs() as lines:
        sink = TraceSink(got.append, At())
        sink(record(points={Point.RECEIVED: 0}, attempts=(None,)))
        sink(record())
    (line,) = lines
    assert (line["event"], line["log_level"], line["request_id"]) == ("trace_failed", "error", "r-1")
    assert got == [spans_of(record(), OFFSET)]
