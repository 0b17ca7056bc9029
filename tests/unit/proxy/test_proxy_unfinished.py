"""A request without a first byte says where it was: in which part, how long, and what of that nobody can know.

Three golden files hold whole traces: read-failed, prefill-failed, read-retried (see records.py).
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pdserve.proxy import parts
from pdserve.proxy.codec import progress_from_wire
from pdserve.proxy.course import DECODES, PREFILLS, Course, Side
from pdserve.proxy.ended import Ended, Outcome, Tried
from pdserve.proxy.parts import Point
from pdserve.proxy.testing import Rig
from pdserve.proxy.testing.rig import ready
from pdserve.proxy.tracing.spans import spans_of
from pdserve.proxy.types import Mode, OnFailure, Progress, Stamps, TransferFacts
from pdserve.proxy.unfinished import of_attempt, of_request, way
from pdserve.rpc.errors import EngineDied, TransferExpired
from pdserve.runtime.clock import boot_id
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Span
from tests.unit.proxy.records import HEAD, LEGS, MS, OFFSET, compare, drawn, record

READ, WRITE = LEGS[Mode.READ], LEGS[Mode.WRITE]
AFTER_MS = 100
PATH = parts.tail(handed_over=True)


def up_to(point: Point, legs: dict[int, int] = READ) -> dict[int, int]:
    """The stamps of one attempt until it passed this point, in the order of the chain."""
    order = [each for each, _ in PATH]
    return {each: legs[each] for each in order[: order.index(point) + 1]}


def tried(points: dict[int, int], unseen: Collection[int] = (), mode: Mode = Mode.READ, **changes: Any) -> Tried:
    """An attempt that failed 100 ms after the request came."""
    said: dict[str, Any] = {"began_ns": 3 * MS, "dispatched_ns": 4 * MS, "ended_ns": AFTER_MS * MS}
    course = Course(**(said | changes), points=points, unseen=frozenset(unseen))
    return Tried("prefill-1", "decode-1", "ab" * 16, mode, 0, "TRANSFER_EXPIRED", "30 s", "prefill-1", course)


def failed(*attempts: Tried, **changes: Any) -> Ended:
    """A request whose attempts these were, and which failed as the last of them."""
    last = attempts[-1]
    fields: dict[str, Any] = {
        "attempts": attempts, "points": HEAD, "outcome": Outcome.FAILED, "reason": last.reason, "error": last.error,
        "finished": None, "finish_reasons": (), "completion_tokens": 0, "ended_ns": last.course.ended_ns + 1 * MS,
    }  # fmt: skip
    return record(**(fields | changes))


def broken(spans: list[Span]) -> Span:
    """The one part that has the error; kvd's span below it may have it, too."""
    failures = [span for span in spans if span.status.failed and span.service.name != names.KVD]
    (part,) = [span for span in failures if span.name not in (names.REQUEST, names.ATTEMPT)]
    return part


# -- golden traces ------------------------------------------------------------------------------


def test_a_read_whose_bytes_did_not_come() -> None:
    """The blocks were reserved and the copy was begun: kv.wait lasts until the failure and has its reason, as has the
    copy below it."""
    facts = TransferFacts(
        kv_bytes=1024, transport="shm", copy_ns=2 * MS, accepted_ns=60 * MS, offered_ns=55 * MS, first_post_ns=65 * MS
    )
    attempt = tried(up_to(Point.DECODE_BLOCKS_RESERVED), facts=facts)
    spans = compare(failed(attempt), "read-failed")
    part = broken(spans)
    assert (part.name, part.service.instance_id) == ("pdserve.kv.wait", "decode-1")
    assert part.status.message == "TRANSFER_EXPIRED: 30 s"
    root = spans[0].attributes
    assert root[names.failed_after_part("kv.wait")] == pytest.approx(0.041)  # from 60 ms to the client's error
    assert not [name for name in root if name.startswith(names.TTFT)]


WAITS = [
    (TransferFacts(accepted_ns=60 * MS), [names.KVD_RESOLVE]),
    (TransferFacts(accepted_ns=60 * MS, first_post_ns=65 * MS), [names.KVD_RESOLVE, names.KVD_COPY]),
    (
        TransferFacts(accepted_ns=60 * MS, first_post_ns=65 * MS, last_byte_ns=70 * MS),
        [names.KVD_RESOLVE, names.KVD_COPY, names.KVD_NOTIFY],
    ),
]


@pytest.mark.parametrize(("facts", "below"), WAITS, ids=[below[-1] for _, below in WAITS])
def test_how_far_kvd_had_come(facts: TransferFacts, below: list[str]) -> None:
    """Of a wait that failed: what had ended lies where kvd's stamps are, what had not lasts until the failure and has
    its reason; nothing is drawn of what was not begun, and nothing is said of blocks that nobody counted."""
    spans = drawn(failed(tried(up_to(Point.DECODE_BLOCKS_RESERVED), facts=facts)))
    wait = broken(spans)
    of_kvd = [span for span in spans if span.service.name == names.KVD]
    assert [span.name for span in of_kvd] == below
    assert {span.parent_id for span in of_kvd} == {wait.span_id}
    assert [span.status for span in of_kvd if span.status.failed] == [wait.status]
    assert (of_kvd[0].start_ns, of_kvd[-1].end_ns) == (wait.start_ns, wait.end_ns)
    assert [span.start_ns - OFFSET for span in of_kvd] == [60 * MS, 65 * MS, 70 * MS][: len(below)]
    assert not any(names.KV_BLOCKS in span.attributes for span in spans)


def test_a_push_that_did_not_end() -> None:
    """WRITE whose link fails behind the forward pass: the push below it ends there, the copy goes on to the failure."""
    facts = TransferFacts(kv_bytes=4096, overlapped_bytes=4096, accepted_ns=9 * MS, first_post_ns=20 * MS)
    points = {point: at for point, at in WRITE.items() if point <= Point.DECODE_BLOCKS_RESERVED}
    spans = drawn(failed(tried(points, mode=Mode.WRITE, facts=facts)))
    assert broken(spans).name == "pdserve.kv.wait"
    push, copy = [span for span in spans if span.service.name == names.KVD]
    assert (push.name, push.start_ns - OFFSET, push.status.failed) == (names.KVD_PUSH, 20 * MS, False)
    assert (copy.name, copy.start_ns - OFFSET, copy.status.failed) == (names.KVD_COPY, 56 * MS, True)
    assert [link.span_id for link in copy.links] == [push.span_id]
    assert [span.attributes[names.KV_BYTES] for span in (push, copy)] == [4096, 0]


def test_a_prefill_that_failed() -> None:
    """In its forward pass; decode was never asked, and no part is drawn of it."""
    attempt = tried(up_to(Point.PREFILL_SCHEDULED))
    part = broken(compare(failed(attempt), "prefill-failed"))
    assert (part.name, part.service.name) == ("pdserve.prefill.forward", names.PREFILL)


def test_a_retried_read() -> None:
    """The first attempt ends in the part that it failed in, the second gave the answer; the root has its TTFT, with
    the part retry, and nothing of a failure."""
    whole = record(Mode.READ)
    later = {point: at + 110 * MS for point, at in READ.items()}
    first_byte = later[Point.TOKEN_RECEIVED] + 1 * MS
    second = Course(
        began_ns=101 * MS, dispatched_ns=114 * MS, first_byte_ns=first_byte, last_token_ns=first_byte + 30 * MS,
        ended_ns=first_byte + 31 * MS, points=later,
    )  # fmt: skip
    points = HEAD | later | {Point.REDISPATCHED: 114 * MS, Point.FIRST_BYTE_WRITTEN: first_byte}
    attempts = (
        tried(up_to(Point.KV_LANDED), {Point.DECODE_SCHEDULED}),
        replace(whole.attempts[0], prefill_engine_id="prefill-2", course=second),
    )
    ended = replace(whole, attempts=attempts, fallbacks=1, points=points, ended_ns=first_byte + 32 * MS)
    spans = compare(ended, "read-retried")
    part = broken(spans)
    assert (part.name, part.attributes[names.FAILED_OR_LATER]) == ("pdserve.decode.queue", ("decode.first_step",))
    root = spans[0].attributes
    assert root[names.ttft_part(names.RETRY)] == pytest.approx(0.110)
    assert names.FAILED_AFTER not in root


# -- which part ---------------------------------------------------------------------------------

PLACES = [
    # of decode nothing is unseen where it was never asked
    ({}, PREFILLS, "prefill.hop", ("prefill.queue", "prefill.forward", "proxy.serialization")),
    ({}, set(), "prefill.hop", ()),
    (up_to(Point.PREFILL_RECEIVED), set(), "prefill.queue", ()),
    (up_to(Point.PREFILL_RECEIVED), {Point.PREFILL_SCHEDULED}, "prefill.queue", ("prefill.forward",)),
    (up_to(Point.PREFILL_FORWARD_END), set(), "proxy.serialization", ()),
    (
        up_to(Point.PREFILL_FORWARD_END), DECODES, "proxy.serialization",
        ("decode.admit", "kv.wait", "decode.queue", "decode.first_step", "detokenize", "encode"),
    ),
    (up_to(Point.DECODE_RECEIVED), {Point.DECODE_BLOCKS_RESERVED}, "decode.admit", ("kv.wait",)),
    (up_to(Point.KV_LANDED), set(), "decode.queue", ()),
    (up_to(Point.DETOKENIZED), set(), "encode", ()),
    (up_to(Point.TOKEN_RECEIVED), set(), "egress", ()),
]  # fmt: skip


@pytest.mark.parametrize(("points", "unseen", "part", "or_later"), PLACES)
def test_the_part_whose_end_was_not_reached(
    points: dict[int, int], unseen: Collection[int], part: str, or_later: tuple[str, ...]
) -> None:
    """It begins at the last stamp; parts that may have been reached unseen are named and get no time."""
    attempt = tried(points, unseen)
    found = of_attempt(attempt)
    assert found is not None
    assert (found.last.part, found.or_later, found.unstamped) == (part, or_later, ())
    assert found.last.start_ns == max([4 * MS, *points.values()])
    assert found.last.end_ns == AFTER_MS * MS
    spans = drawn(failed(attempt))
    assert broken(spans).name == names.part_span(part)
    assert spans[0].attributes[names.FAILED_IN] == part


def test_what_decode_had_passed_beside_prefill_counts_nothing() -> None:
    """WRITE: decode had its blocks when prefill failed in its forward pass, which is where the request was."""
    decode = {point: at for point, at in WRITE.items() if point in (8, 9)}
    found = of_attempt(tried(decode | up_to(Point.PREFILL_SCHEDULED, WRITE), mode=Mode.WRITE))
    assert found is not None
    assert (found.last.part, found.last.start_ns) == ("prefill.forward", 16 * MS)


def test_what_decode_had_passed_says_nothing_of_prefill() -> None:
    """WRITE: it failed at decode, which had its blocks, and prefill, which was let go, has said nothing: it may have
    been anywhere in prefill or in the wait for the KV, and no part of that is made up."""
    decode = {point: at for point, at in WRITE.items() if point in (8, 9)}
    attempt = tried(decode, PREFILLS, Mode.WRITE)
    found = of_attempt(attempt)
    assert found is not None
    assert (found.last.part, found.or_later) == ("prefill.hop", ("prefill.queue", "prefill.forward", "kv.wait"))
    assert (found.last.start_ns, found.unattributed, found.unstamped) == (4 * MS, 0, ())
    landed = of_attempt(tried(decode | {Point.KV_LANDED: 60 * MS}, PREFILLS, Mode.WRITE))
    assert landed is not None
    assert landed.last == parts.Interval("decode.queue", 60 * MS, AFTER_MS * MS)
    assert set(landed.parts) == {"decode.queue"}, "what decode waited for prefill is no wait for the KV"
    assert landed.unattributed == pytest.approx(0.056)


def test_what_nobody_stamped_is_nobodys() -> None:
    """READ: decode was asked, so prefill had done its work, and has not said when: its time is unattributed and its
    parts are named."""
    decode = {point: at for point, at in READ.items() if point in (8, 9)}
    attempt = tried(decode, PREFILLS)
    found = of_attempt(attempt)
    assert found is not None
    assert found.last.part == "kv.wait"
    assert found.unstamped == ("prefill.hop", "prefill.queue", "prefill.forward")
    assert set(found.parts) == {"decode.admit", "kv.wait"}
    assert found.unattributed == pytest.approx(0.054)
    spans = drawn(failed(attempt))
    assert spans[0].attributes[names.UNSTAMPED] == found.unstamped
    assert broken(spans).attributes[names.UNSTAMPED] == found.unstamped


def test_where_other_engines_did_not_come() -> None:
    """The attempt failed for one reason and the request, which waited for another pair, for another one: it ended in
    the part retry, and the wait is drawn behind the attempt."""
    ended = failed(tried(up_to(Point.KV_LANDED)), reason="OVERLOADED", error="no room", ended_ns=400 * MS, waited=True)
    found = of_request(ended)
    assert found is not None
    assert found.last == parts.Interval(names.RETRY, 4 * MS, 400 * MS)
    spans = drawn(ended)
    waited = spans[-1]
    assert (waited.name, waited.parent_id) == ("pdserve.admit", spans[0].span_id)
    assert waited.status.message == "OVERLOADED: no room"
    assert waited.end_ns == spans[0].end_ns
    assert [span.name for span in spans if span.status.failed] == [
        names.REQUEST, names.ATTEMPT, "pdserve.decode.queue", "pdserve.admit",
    ]  # fmt: skip


async def test_engines_that_leave_while_they_are_waited_for() -> None:
    """The request ends with the attempt's own error: the wait for another pair is the part retry all the same. One that
    finds nobody at once has not waited, and ended where its attempt did."""
    rig = Rig(prefills=2, decodes=1)
    rig.ledger.reserve("p1", 150)  # so full that the next attempt must wait for it
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("gone"))
    await rig.queued(1)
    rig.registry.channel_broken("p1", "gone")
    rig.ledger.left("p1")
    rig.admission.pump()
    with pytest.raises(EngineDied):
        await run.task
    found = of_request(rig.ended[0])
    assert found is not None
    assert found.last.part == names.RETRY
    assert found.last.end_ns == rig.ended[0].ended_ns

    alone = Rig(prefills=1, decodes=1)
    run = alone.start(alone.job(on_failure=OnFailure.FAIL))
    (await alone.legs.nth_prefill(0)).fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    found = of_request(alone.ended[0])
    assert found is not None
    assert found.last.part == "prefill.hop"


async def test_a_client_that_leaves_before_anything_is_asked() -> None:
    """Its engines were chosen and no leg was opened: it ended in route, drawn with the error; no attempt is."""
    rig = Rig()
    events = rig.driver.run(rig.job())
    await anext(events)
    await events.aclose()
    spans = spans_of(rig.ended[0], 0)
    assert spans[0].attributes[names.FAILED_IN] == "route"
    assert [span.name for span in spans if span.status.failed] == [names.REQUEST, "pdserve.route"]
    assert names.ATTEMPT not in {span.name for span in spans}


def test_where_a_third_pair_did_not_come() -> None:
    """Also after a second attempt, whose own beginning is then behind."""
    second = tried({}, began_ns=101 * MS, dispatched_ns=110 * MS, ended_ns=150 * MS)
    points = HEAD | {Point.REDISPATCHED: 110 * MS}
    ended = failed(
        tried({}), second, points=points, reason="OVERLOADED", error="no room", ended_ns=400 * MS, waited=True
    )
    found = of_request(ended)
    assert found is not None
    assert found.last == parts.Interval(names.RETRY, 4 * MS, 400 * MS)
    drawn(ended)


def test_a_second_attempt_that_failed_too() -> None:
    """The first is in retry, the parts behind it are the second's."""
    second = tried(
        {Point.PREFILL_RECEIVED: 120 * MS}, began_ns=101 * MS, dispatched_ns=110 * MS, ended_ns=150 * MS
    )  # fmt: skip
    ended = failed(tried({}, PREFILLS), second, points=HEAD | {Point.REDISPATCHED: 110 * MS}, fallbacks=1)
    found = of_request(ended)
    assert found is not None
    assert found.parts == pytest.approx(
        {"tokenize": 0.001, "admit": 0.002, "route": 0.001, "retry": 0.106, "prefill.hop": 0.01, "prefill.queue": 0.031}
    )
    drawn(ended)


def test_what_ended_well_has_no_failure() -> None:
    """An answer that broke off after its first byte has its TTFT; a good one, too."""
    whole = record()
    one = replace(whole.attempts[0], reason="ENGINE_DIED")
    assert of_request(whole) is None
    assert of_attempt(one) is None
    assert of_request(replace(whole, attempts=(one,), outcome=Outcome.FAILED, reason="ENGINE_DIED")) is None
    every: dict[int, int] = {point: 5 for point, _ in PATH}
    assert way(every, frozenset(), PATH, 0, 10, None) is None


# -- where it is known from ---------------------------------------------------------------------


def test_the_clock_of_a_service_that_failed() -> None:
    """Its end counts as its last stamp: what lies between the last real one and the error is not its way back."""
    progress = Progress(Stamps("elsewhere", {8: 1_000_100}), frozenset({9}), ended_ns=1_000_900)
    side = Side.failed(progress, DECODES, "here", 0, 1_000)
    assert side.at == {8: 100}
    assert side.unseen == {9}
    assert (side.clock.offset_ns, side.clock.uncertainty_ns) == (1_000_000, 100)
    assert Side.failed(None, DECODES, "here", 0, 1_000) == Side(unseen=DECODES)
    assert Side.heard(Stamps("here", {5: 1, 7: 3}), PREFILLS, "here", 0, 4) == Side({5: 1, 7: 3}, frozenset({6}))


@pytest.mark.parametrize("said", [b"", b"\xff\xff"])
def test_no_progress_spoils_no_error(said: bytes) -> None:
    """Nothing, and what cannot be read, are no word on it."""
    assert progress_from_wire(said) is None


async def test_what_a_failed_decode_says_is_in_the_record() -> None:
    """Its stamps, what it could not see and kvd's facts, beside prefill's own from `ready`; no later answer asks."""
    rig = Rig()
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).say(ready())
    facts = TransferFacts(accepted_ns=7)
    stamps = Stamps(boot_id(), {Point.DECODE_RECEIVED: 5, Point.DECODE_BLOCKS_RESERVED: 7})
    decode = await rig.legs.nth_decode(0)
    decode.fail(TransferExpired("30 s"), Progress(stamps, frozenset(), 9, facts))
    with pytest.raises(TransferExpired):
        await run.task
    (course,) = [each.course for each in rig.ended[0].attempts]
    assert course.points == {5: 1, 6: 1, 7: 1, 8: 5, 9: 7}
    assert (course.unseen, course.facts) == (frozenset(), facts)
    assert spans_of(rig.ended[0], 0)[0].attributes[names.FAILED_IN] == "kv.wait"


async def test_who_was_killed_has_said_nothing() -> None:
    """A prefill that is gone may have been anywhere; decode, which was not asked, was nowhere."""
    rig = Rig()
    run = rig.start(rig.job(on_failure=OnFailure.FAIL))
    (await rig.legs.nth_prefill(0)).fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        await run.task
    (course,) = [each.course for each in rig.ended[0].attempts]
    assert (course.points, course.unseen) == ({}, PREFILLS)
