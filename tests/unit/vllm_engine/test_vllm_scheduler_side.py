"""The connector's scheduler half, against what vLLM's scheduler says; kvd's link is a fake."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.handoff import params as handoff_params
from pdserve.engine.port import Consume, Produce
from pdserve.engine.vllm import news
from pdserve.engine.vllm.scheduler_side import SchedulerSide
from pdserve.kvd.client import Accept, Begin, Cancel, End, Offer, Outcome, Request, Retract
from pdserve.kvd.types import Mode

TRANSFER = b"t" * 16
READ = Consume(TRANSFER, Mode.READ, consumer=1, ticket=b"ticket")
WRITE = Produce(TRANSFER, Mode.WRITE, peer_locator=b"locator")


class FakeLink:
    """Records what is sent; ends come by hand."""

    def __init__(self) -> None:
        self.sent: list[Request] = []
        self.ends: list[End] = []
        self.ends_available = threading.Event()
        self.closed = False

    def send(self, message: Request) -> None:
        self.sent.append(message)

    def end(self, handle: str, outcome: Outcome, reason: str = "", *, producer: bool = False) -> None:
        self.ends.append(End(handle, TRANSFER, outcome, reason, "detail", producer=producer, consumer=1))
        self.ends_available.set()

    def drain_ends(self) -> Sequence[End]:
        self.ends_available.clear()
        ends, self.ends = self.ends, []
        return ends

    def close(self) -> None:
        self.closed = True


class Watch(threading.Event):
    """An event that counts who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return self.is_set()


@pytest.fixture
def link() -> FakeLink:
    """See FakeLink."""
    return FakeLink()


@pytest.fixture
def side(link: FakeLink) -> SchedulerSide:
    """Blocks of 32 tokens; the time stands still."""
    return SchedulerSide(link, 32, SimpleNamespace(monotonic_ns=lambda: 7))


def a_request(name: str, kv: Produce | Consume | None, tokens: int, computed: int = 0) -> Any:
    """vLLM's Request, as far as we look."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=handoff_params.encode(kv),
        num_prompt_tokens=tokens,
        num_computed_tokens=computed,
    )


def a_step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int, list[int] | None]] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """vLLM's SchedulerOutput: new requests as (computed, tokens), others as (computed, tokens, more blocks)."""
    new, cached = new or {}, cached or {}
    tokens = {name: row[1] for name, row in (new | cached).items()}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=row[0]) for name, row in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[row[0] for row in cached.values()],
            new_block_ids=[None if row[2] is None else (row[2],) for row in cached.values()],
        ),
        preempted_req_ids=preempted,
    )


def test_a_request_without_a_part_costs_kvd_nothing(side: SchedulerSide, link: FakeLink) -> None:
    """Plain traffic is plain vLLM: nothing external, nothing said, nothing kept."""
    plain = a_request("r", None, 100)
    assert side.matched(plain, 0) == (0, False)
    side.allocated(plain, [1, 2, 3, 4], 0)
    assert side.round(a_step(new={"r": (0, 100)})).plan.empty
    assert side.finished(plain, [1, 2, 3, 4], True) == (False, None)
    assert link.sent == []


def test_a_foreign_map_is_plain_traffic(side: SchedulerSide, link: FakeLink) -> None:
    """Another connector's kv_transfer_params do not end the engine."""
    foreign = a_request("r", None, 100)
    foreign.kv_transfer_params = {"do_remote_prefill": True}
    assert side.matched(foreign, 0) == (0, False)
    side.allocated(foreign, [1], 0)
    assert side.finished(foreign, [1], True) == (False, None)
    assert link.sent == []


def test_a_consumer_takes_what_it_lacks(side: SchedulerSide, link: FakeLink) -> None:
    """vLLM presents whole local blocks; the accept skips them and the news counts them."""
    consumer = a_request("c", READ, 100)
    assert side.matched(consumer, 64) == (36, True)
    side.allocated(consumer, [9, 8, 7, 6], 36)
    side.round(a_step())
    accept = link.sent[0]
    assert isinstance(accept, Accept)
    assert (accept.block_ids, accept.first_block, accept.ticket) == ((7, 6), 2, b"ticket")
    assert side.take_news() == [news.Taken(TRANSFER, 1, 64)]
    link.end("c", Outcome.LANDED)
    assert side.round(a_step()).plan.received == ("c",)
    side.allocated(consumer, [9, 8, 7, 6], 0)  # vLLM says it again when it schedules the request
    assert len(link.sent) == 1
    assert side.take_news() == []
    assert side.finished(consumer, [9, 8, 7, 6], True) == (False, None)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_failed_consumer_waits_for_its_abort_unless_it_may_recompute(
    recompute: bool, side: SchedulerSide, link: FakeLink
) -> None:
    """vLLM asks again after a failed load: without leave the answer is 'later', so that nothing is
    computed before the service aborts; the service learns why by the news."""
    consumer = a_request("c", replace(READ, recompute=recompute), 100)
    side.allocated(consumer, [1, 2, 3, 4], 100)
    side.take_news()
    link.end("c", Outcome.FAILED, "PEER_LOST")
    done = side.round(a_step())
    assert (done.plan.failed, done.failed_blocks) == (("c",), (1, 2, 3, 4))
    assert side.take_news() == [news.Failed(TRANSFER, 1, "PEER_LOST", "detail")]
    assert side.matched(consumer, 0) == ((0, False) if recompute else (None, False))
    side.finished(consumer, [], False)
    assert side.matched(a_request("other", READ, 100), 0) == (100, True)


def test_a_writing_producer_names_each_block_once(side: SchedulerSide, link: FakeLink) -> None:
    """Chunks of 80 tokens: a block goes with the chunk that fills it, the partial one with the last;
    vLLM names only new blocks after the first chunk."""
    producer = a_request("p", WRITE, 200)
    side.allocated(producer, [5, 6, 7], 0)
    chunks = [
        side.round(a_step(new={"p": (0, 80)})).plan.chunks,
        side.round(a_step(cached={"p": (80, 80, [8, 9])})).plan.chunks,
        side.round(a_step(cached={"p": (160, 40, [10, 11])})).plan.chunks,
    ]
    assert [(c.first_block, c.block_ids, c.ready_blocks) for (c,) in chunks] == [
        (0, (5, 6), 2),
        (2, (7, 8, 9), 5),
        (5, (10, 11), 7),
    ]
    assert isinstance(link.sent[0], Begin)
    producer.num_computed_tokens = 200
    held, answer = side.finished(producer, [5, 6, 7, 8, 9, 10, 11], True)
    assert held
    assert handoff_params.decode_offered(answer) == (200, 7, 7)
    assert isinstance(link.sent[-1], Offer)
    link.end("p", Outcome.RELEASED, producer=True)
    assert side.round(a_step()).plan.sent == ("p",)


def test_a_preempted_producer_names_its_new_blocks(side: SchedulerSide, link: FakeLink) -> None:
    """After a preemption the attempt is fenced and the blocks that vLLM gives next are named from
    the first one, also where it gives them in the same round."""
    producer = a_request("p", WRITE, 100)
    side.allocated(producer, [5, 6], 0)
    side.round(a_step(new={"p": (0, 64)}))
    side.allocated(producer, [1, 2, 3], 0)
    plan = side.round(a_step(cached={"p": (0, 70, [1, 2, 3])}, preempted={"p"})).plan
    assert [(fence.handle, fence.attempt) for fence in plan.fences] == [("p", 0)]
    assert isinstance(link.sent[1], Retract)
    (chunk,) = plan.chunks
    assert (chunk.attempt, chunk.first_block, chunk.block_ids) == (1, 0, (1, 2))
    (last,) = side.round(a_step(cached={"p": (70, 30, [4])})).plan.chunks
    assert (last.first_block, last.block_ids, last.ready_blocks) == (2, (3, 4), 4)


def test_an_aborted_consumer_gives_its_transfer_up(side: SchedulerSide, link: FakeLink) -> None:
    """Its blocks are vLLM's again only when the end has come, so the end is asked for."""
    consumer = a_request("c", READ, 100)
    side.allocated(consumer, [1, 2, 3, 4], 100)
    side.finished(consumer, [1, 2, 3, 4], False)
    assert isinstance(link.sent[-1], Cancel)
    link.end("c", Outcome.CANCELLED, "CANCELLED")
    assert side.round(a_step()).plan.received == ("c",)


def test_it_waits_only_in_rounds_without_work(side: SchedulerSide, link: FakeLink) -> None:
    """A running stream never waits for a hand-over; EngineCore without work does not spin."""
    link.ends_available = watch = Watch()
    side.round(a_step())
    assert watch.waits == 0  # nothing to wait for
    side.allocated(a_request("c", READ, 100), [1, 2, 3, 4], 100)
    side.round(a_step())
    assert (watch.waits, len(link.sent)) == (0, 1)  # first kvd is told
    side.round(a_step(new={"other": (0, 5)}))
    assert watch.waits == 0
    side.round(a_step())
    assert watch.waits == 1


def test_closing_leaves_kvd(side: SchedulerSide, link: FakeLink) -> None:
    """The attachment is the side's to close."""
    side.close()
    assert link.closed
