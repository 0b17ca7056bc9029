"""The scheduler's half: every row of MORI-IO's failure table and of vLLM's calling habits."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.handoff import params
from pdserve.engine.handoff.scheduler import Fence, ScheduledChunk, SchedulerHandoff, StepPlan
from pdserve.engine.port import Consume, Produce
from pdserve.kvd.client.messages import Accept, Begin, Cancel, End, Offer, Outcome, Retract
from pdserve.kvd.notices import Chunk
from pdserve.kvd.types import Mode

TID = bytes(range(16))
READ_P = Produce(TID, Mode.READ)
WRITE_P = Produce(TID, Mode.WRITE, 2)
READ_C = Consume(TID, Mode.READ, 1, ticket=b"ticket")
WRITE_C = Consume(TID, Mode.WRITE, 0, peer_locator=b"locator")
BOTH_C = pytest.mark.parametrize("kv", [READ_C, WRITE_C], ids=["read", "write"])
BOTH_P = pytest.mark.parametrize("kv", [READ_P, WRITE_P], ids=["read", "write"])


def end(handle: str, outcome: Outcome = Outcome.RELEASED) -> End:
    return End(handle, TID, outcome, "" if outcome.good else "PEER_LOST")


def step(handoff: SchedulerHandoff, *chunks: ScheduledChunk, preempted: tuple[str, ...] = ()) -> StepPlan:
    return handoff.step(chunks, preempted)


# -- consumers ------------------------------------------------------------------------------


@BOTH_C
def test_a_consumer_takes_the_missing_prompt_and_is_received_once(handoff: Any, link: Any, kv: Consume) -> None:
    """Asked as often as vLLM likes, it claims prompt minus local hit, accepts the missing blocks once
    and is reported once."""
    assert handoff.matched("c", kv, 10, 4) == (6, True)
    assert handoff.matched("c", kv, 10, 4) == (6, True)
    assert link.take() == []
    handoff.allocated("c", kv, 10, [5, 6, 7], 4, 6)
    handoff.allocated("c", kv, 10, [5, 6, 7], 4, 6)
    assert step(handoff).waiting == 1
    assert link.take() == [
        Accept("c", TID, kv.consumer, (6, 7), 1, kv.ticket, kv.peer_locator, stamped_ns=7)
    ]  # fmt: skip
    link.ends = [end("c", Outcome.LANDED)]
    plan = step(handoff)
    assert (plan.received, plan.failed, plan.sent, plan.waiting) == (("c",), (), (), 0)
    assert step(handoff).empty
    # The second call after the load, and the question after it, change nothing.
    handoff.allocated("c", kv, 10, [5, 6, 7], 9, 0)
    assert handoff.matched("c", kv, 10, 0) == (0, False)
    assert handoff.finished("c", kv, [5, 6, 7], 12, True) == (False, None)
    assert link.take() == []
    assert handoff.idle


def test_blocks_beyond_the_prompt_are_not_named(handoff: Any, link: Any) -> None:
    """Lookahead blocks are the engine's own."""
    handoff.allocated("c", READ_C, 8, [1, 2, 3], 0, 8)
    step(handoff)
    (accept,) = link.take()
    assert accept.block_ids == (1, 2)


@BOTH_C
def test_a_prompt_that_is_all_here_still_lets_the_producer_go(handoff: Any, link: Any, kv: Consume) -> None:
    """A full local hit claims nothing, and kvd is told with an accept without blocks; its end is
    not the engine's business."""
    assert handoff.matched("c", kv, 8, 8) == (0, False)
    handoff.allocated("c", kv, 8, [1, 2], 8, 0)
    step(handoff)
    (accept,) = link.take()
    assert (accept.block_ids, accept.first_block) == ((), 2)
    link.ends = [end("c", Outcome.LANDED)]
    assert step(handoff).empty
    handoff.finished("c", kv, [1, 2], 9, True)
    assert handoff.idle


def test_a_request_without_params_takes_nothing(handoff: Any, link: Any) -> None:
    """A9: a plain request at a consumer is computed; nothing is claimed that nobody loads."""
    assert handoff.matched("x", None, 100, 0) == (0, False)
    handoff.allocated("x", None, 100, [1], 0, 0)
    assert handoff.finished("x", None, [1], 100, True) == (False, None)
    assert step(handoff).empty
    assert link.take() == []


def test_a_producer_claims_nothing(handoff: Any) -> None:
    """A producer computes."""
    assert handoff.matched("p", READ_P, 100, 0) == (0, False)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED])
def test_a_failed_load_is_received_and_failed_and_then_recomputed(handoff: Any, link: Any, outcome: Outcome) -> None:
    """A9, P dies or its write fails: D hears it, and asked again computes the prompt."""
    handoff.allocated("c", WRITE_C, 10, [5, 6, 7], 0, 10)
    step(handoff)
    link.take()
    link.ends = [end("c", outcome)]
    plan = step(handoff)
    assert (plan.received, plan.failed) == (("c",), ("c",))
    assert handoff.matched("c", WRITE_C, 10, 0) == (0, False)
    handoff.allocated("c", WRITE_C, 10, [8, 9, 1], 0, 0)
    step(handoff)
    assert link.take() == []


def test_a_preempted_consumer_recomputes(handoff: Any, link: Any) -> None:
    """A9, preemption on D: after landing the transfer is used up; nothing is claimed or fenced."""
    handoff.allocated("c", READ_C, 10, [5, 6, 7], 0, 10)
    step(handoff)
    link.ends = [end("c", Outcome.LANDED)]
    step(handoff)
    link.take()
    assert step(handoff, preempted=("c",)).empty
    assert handoff.matched("c", READ_C, 10, 0) == (0, False)
    handoff.allocated("c", READ_C, 10, [5, 6, 7], 0, 0)
    step(handoff)
    assert link.take() == []


@BOTH_C
def test_a_consumer_aborted_before_it_has_blocks_cancels(handoff: Any, link: Any, kv: Consume) -> None:
    """A9, D aborts before alloc: the producer is let go at once, not by a TTL."""
    handoff.matched("c", kv, 10, 0)
    assert handoff.finished("c", kv, [], 0, False) == (False, None)
    assert link.take() == [Cancel(TID, "CONSUMER_FAILED")]


@BOTH_C
@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.LANDED])
def test_a_consumer_aborted_while_it_loads_is_still_received(
    handoff: Any, link: Any, kv: Consume, outcome: Outcome
) -> None:
    """A9, D aborts while waiting: cancelled at kvd, and reported once when that is over, whichever
    way, so that vLLM frees the blocks."""
    handoff.allocated("c", kv, 10, [5, 6, 7], 0, 10)
    assert handoff.finished("c", kv, [5, 6, 7], 10, False) == (False, None)
    assert [type(m) for m in link.take()] == [Accept, Cancel]
    assert step(handoff).waiting == 1
    handoff.finished("c", kv, [5, 6, 7], 10, False)
    assert link.take() == []
    link.ends = [end("c", outcome)]
    assert step(handoff).received == ("c",)
    assert handoff.idle


def test_an_abort_that_crosses_the_end_is_harmless(handoff: Any, link: Any) -> None:
    """The end was reported, then the abort comes: nothing is sent or reported again."""
    handoff.allocated("c", READ_C, 10, [5, 6, 7], 0, 10)
    link.ends = [end("c", Outcome.LANDED)]
    assert step(handoff).received == ("c",)
    link.take()
    assert handoff.finished("c", READ_C, [5, 6, 7], 10, False) == (False, None)
    assert link.take() == []
    link.ends = [end("c", Outcome.LANDED)]
    assert step(handoff).empty
    assert handoff.ignored_ends == 1


# -- producers ------------------------------------------------------------------------------


def run_write(handoff: SchedulerHandoff, prompt: int = 10, blocks: tuple[int, ...] = (5, 6, 7)) -> StepPlan:
    """A WRITE producer whose whole prompt is scheduled in one step."""
    handoff.allocated("p", WRITE_P, prompt, blocks, 0, 0)
    return step(handoff, ScheduledChunk("p", blocks, 0, prompt))


def test_a_write_producer_begins_once_announces_and_offers(handoff: Any, link: Any) -> None:
    """Begin at allocation, one chunk with the partial block, offer at the end, sent once after its end."""
    plan = run_write(handoff)
    assert plan.chunks == (Chunk("p", 0, 0, (5, 6, 7), 3),)
    assert link.take() == [Begin("p", TID, Mode.WRITE, 2)]
    held, out = handoff.finished("p", WRITE_P, [5, 6, 7], 10, True)
    assert (held, params.decode_offered(out)) == (True, (10, 3, 7))
    assert link.take() == [Offer("p", TID, 0, (5, 6, 7), 10, Mode.WRITE, 2, 7)]
    assert step(handoff).waiting == 1
    link.ends = [end("p")]
    plan = step(handoff)
    assert (plan.sent, plan.received) == (("p",), ())
    assert handoff.idle


def test_the_answer_says_when_the_last_chunk_began(link: Any) -> None:
    """Stamped when that chunk is planned, neither earlier nor at the offer; again in a new attempt."""
    ticks = itertools.count(1)
    handoff = SchedulerHandoff(link, 4, SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    handoff.allocated("p", WRITE_P, 10, (5, 6, 7), 0, 0)
    first = next(ticks)
    step(handoff, ScheduledChunk("p", (5, 6, 7), 0, 8))
    step(handoff, ScheduledChunk("p", (5, 6, 7), 8, 2))
    step(handoff, preempted=("p",))
    step(handoff, ScheduledChunk("p", (1, 2, 3), 0, 8))
    step(handoff, ScheduledChunk("p", (1, 2, 3), 8, 2))
    _, out = handoff.finished("p", WRITE_P, [1, 2, 3], 10, True)
    assert params.decode_offered(out).last_chunk_ns == first + 2
    assert link.sent[-1].stamped_ns == first + 3


def test_a_read_producer_offers_without_begin_or_chunks(handoff: Any, link: Any) -> None:
    """READ says nothing before the offer."""
    handoff.allocated("p", READ_P, 10, [5, 6, 7], 0, 0)
    assert step(handoff, ScheduledChunk("p", [5, 6, 7], 0, 10)).empty
    assert link.take() == []
    held, _ = handoff.finished("p", READ_P, [5, 6, 7, 8], 10, True)
    assert held
    (offer,) = link.take()
    assert offer.block_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("cached", "chunks", "announced"),
    [
        (0, (4, 6), [Chunk("p", 0, 0, (5,), 1), Chunk("p", 0, 1, (6, 7), 3)]),
        (0, (3, 3, 4), [None, Chunk("p", 0, 0, (5,), 1), Chunk("p", 0, 1, (6, 7), 3)]),
        (8, (2,), [Chunk("p", 0, 0, (5, 6, 7), 3)]),
        (4, (1, 5), [Chunk("p", 0, 0, (5,), 1), Chunk("p", 0, 1, (6, 7), 3)]),
        (0, (10, 1), [Chunk("p", 0, 0, (5, 6, 7), 3), None]),
    ],
    ids=["aligned", "unaligned", "cached-prefix", "cached-and-chunked", "decode-steps-after"],
)
def test_only_whole_blocks_are_announced_and_the_partial_one_last(
    handoff: Any, link: Any, cached: int, chunks: tuple[int, ...], announced: list[Chunk | None]
) -> None:
    """Design 5: whole blocks as chunks fill them, cached ones when first scheduled, the last chunk all."""
    handoff.allocated("p", WRITE_P, 10, [5, 6, 7], cached, 0)
    computed = cached
    for count, chunk in zip(chunks, announced, strict=True):
        plan = step(handoff, ScheduledChunk("p", [5, 6, 7, 8], computed, count))
        assert plan.chunks == (() if chunk is None else (chunk,))
        computed += count


def test_growing_block_lists_are_read_as_they_grow(handoff: Any) -> None:
    """vLLM gives blocks chunk by chunk."""
    handoff.allocated("p", WRITE_P, 10, [5], 0, 0)
    assert step(handoff, ScheduledChunk("p", [5], 0, 4)).chunks == (Chunk("p", 0, 0, (5,), 1),)
    assert step(handoff, ScheduledChunk("p", [5, 6, 7], 4, 6)).chunks == (Chunk("p", 0, 1, (6, 7), 3),)


def test_a_preempted_write_producer_is_fenced_and_starts_from_nothing(handoff: Any, link: Any) -> None:
    """A9, preemption of P: retract, fence, and attempt 1 announces everything again."""
    run_write(handoff)
    link.take()
    plan = step(handoff, preempted=("p",))
    assert plan.fences == (Fence("p", 0),)
    assert link.take() == [Retract("p", 0, False, "PRODUCER_FAILED")]
    handoff.allocated("p", WRITE_P, 10, [1, 2, 3], 0, 0)
    plan = step(handoff, ScheduledChunk("p", [1, 2, 3], 0, 10))
    assert plan.chunks == (Chunk("p", 1, 0, (1, 2, 3), 3),)
    assert link.take() == []
    handoff.finished("p", WRITE_P, [1, 2, 3], 10, True)
    (offer,) = link.take()
    assert (offer.attempt, offer.block_ids) == (1, (1, 2, 3))


def test_preempted_and_scheduled_again_in_one_round(handoff: Any, link: Any) -> None:
    """A prefix-cache reset preempts and resumes at once: fence first, then the new attempt's chunk,
    and lost blocks are taken back before another request's accept names them."""
    run_write(handoff)
    link.take()
    handoff.allocated("c", READ_C, 10, [5, 6, 7], 0, 10)
    handoff.allocated("p", WRITE_P, 10, [1, 2, 3], 0, 0)
    plan = step(handoff, ScheduledChunk("p", [1, 2, 3], 0, 4), preempted=("p",))
    assert plan.fences == (Fence("p", 0),)
    assert plan.chunks == (Chunk("p", 1, 0, (1,), 1),)
    assert [type(m) for m in link.take()] == [Retract, Accept]


def test_a_preempted_read_producer_needs_no_fence(handoff: Any, link: Any) -> None:
    """kvd has not heard of it: nothing is in flight, the attempt stays 0."""
    handoff.allocated("p", READ_P, 10, [5, 6, 7], 0, 0)
    assert step(handoff, preempted=("p", "unknown")).empty
    handoff.allocated("p", READ_P, 10, [1, 2, 3], 0, 0)
    handoff.finished("p", READ_P, [1, 2, 3], 10, True)
    (offer,) = link.take()
    assert offer.attempt == 0


@pytest.mark.parametrize(
    ("by_length", "computed"), [(False, 4), (False, 10), (True, 4)], ids=["aborted", "stopped", "cut-short"]
)
def test_a_write_producer_given_up_holds_its_blocks_until_the_fence(
    handoff: Any, link: Any, by_length: bool, computed: int
) -> None:
    """A9, P aborts or its first token stops: retracted for good, blocks held until the end, D is told."""
    run_write(handoff)
    link.take()
    assert handoff.finished("p", WRITE_P, [5, 6, 7], computed, by_length) == (True, None)
    assert link.take() == [Retract("p", 0, True, "PRODUCER_FAILED")]
    assert handoff.finished("p", WRITE_P, [5, 6, 7], computed, by_length) == (True, None)
    assert link.take() == []
    link.ends = [end("p", Outcome.CANCELLED)]
    assert step(handoff).sent == ("p",)
    assert handoff.idle


def test_a_read_producer_given_up_frees_at_once_and_tells(handoff: Any, link: Any) -> None:
    """Nothing can be in flight before an offer."""
    handoff.allocated("p", READ_P, 10, [5, 6, 7], 0, 0)
    assert handoff.finished("p", READ_P, [5, 6, 7], 4, False) == (False, None)
    assert link.take() == [Cancel(TID, "PRODUCER_FAILED")]
    assert handoff.idle


@BOTH_P
def test_a_producer_aborted_in_the_queue_tells_decode(handoff: Any, link: Any, kv: Produce) -> None:
    """A prefill that never ran must not leave decode waiting."""
    assert handoff.finished("p", kv, [], 0, False) == (False, None)
    assert link.take() == [Cancel(TID, "PRODUCER_FAILED")]


@pytest.mark.parametrize(("outcome", "tokens"), [(Outcome.CANCELLED, 0), (Outcome.RELEASED, 10)])
def test_an_end_before_the_finish_frees_at_once(handoff: Any, link: Any, outcome: Outcome, tokens: int) -> None:
    """D gave up (or needed nothing) while P computed: no more chunks, no offer, nothing held or sent."""
    run_write(handoff)
    link.take()
    link.ends = [end("p", outcome)]
    plan = step(handoff, ScheduledChunk("p", [5, 6, 7], 0, 10), preempted=("p",))
    assert plan.empty
    held, out = handoff.finished("p", WRITE_P, [5, 6, 7], 10, True)
    assert (held, params.decode_offered(out).tokens) == (False, tokens)
    assert link.take() == []
    link.ends = [end("p", outcome)]
    assert step(handoff).empty


def test_duplicate_and_unknown_ends_are_swallowed(handoff: Any, link: Any) -> None:
    """A completion reported twice, or for a stranger, would kill vLLM's core."""
    run_write(handoff)
    handoff.finished("p", WRITE_P, [5, 6, 7], 10, True)
    link.ends = [end("p"), end("p"), end("stranger")]
    assert step(handoff).sent == ("p",)
    assert handoff.ignored_ends == 2


def test_steps_are_numbered_and_every_end_is_heard(link: Any) -> None:
    """kvd counts steps; a host of the scheduler hears each end once."""

    class Clock:
        def monotonic_ns(self) -> int:
            return 0

    heard: list[str] = []
    handoff = SchedulerHandoff(link, 4, Clock(), on_end=lambda e: heard.append(e.handle))
    link.ends = [end("a")]
    assert [step(handoff).step, step(handoff).step] == [1, 2]
    assert heard == ["a"]
