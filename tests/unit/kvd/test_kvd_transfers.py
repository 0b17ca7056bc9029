"""What the core does with each message, in the orders that happen. Time and copies by hand."""

import pytest

from pdserve.kvd.book import Timer
from pdserve.kvd.client.messages import Fenced, Outcome
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk, LayerReady
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import PROTOCOL, Mode
from pdserve.rpc.errors import InvalidRequest

T = b"transfer-0000001"
U = b"transfer-0000002"


@pytest.fixture
def driver() -> CoreDriver:
    """A core with a producer engine P and a consumer engine C, two layers, 16 blocks."""
    made = CoreDriver(Limits(lease=30, accept=10, transfer=30, fence=5, park=20, tie=2))
    made.engine("P")
    made.engine("C")
    return made


def how(driver: CoreDriver, engine: str, handle: str) -> tuple[Outcome, str]:
    """A handle's outcome and reason."""
    end = driver.ends[engine, handle]
    return end.outcome, end.reason


def all_free(driver: CoreDriver, *engines: str) -> bool:
    """Whether no block of these engines is held."""
    return all(driver.leases.counts(e, 16).free == 16 for e in engines) and not len(driver.leases)


# -- READ -----------------------------------------------------------------------------------


@pytest.mark.parametrize("offer_first", [True, False])
def test_read_lands_and_releases_in_either_order(driver: CoreDriver, offer_first: bool) -> None:
    """Offer and accept in any order: one copy of all layers, then LANDED and RELEASED, blocks free."""
    if offer_first:
        driver.offer("P", "p", T, (3, 4))
        driver.accept("C", "c", T, (5, 6), "P")
    else:
        driver.accept("C", "c", T, (5, 6), "P")
        assert not driver.posts
        driver.offer("P", "p", T, (3, 4))
    (post,) = driver.posts.values()
    assert (post.layers, post.src_blocks, post.dst_blocks) == ((0, 1), (3, 4), (5, 6))
    assert not driver.ends
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert how(driver, "P", "p") == (Outcome.RELEASED, "")
    assert all_free(driver, "P", "C")


def test_read_does_not_copy_before_the_offer(driver: CoreDriver) -> None:
    """A READ that has begun and was accepted waits for its offer, whatever the notices say."""
    driver.begin("P", "p", T, Mode.READ)
    driver.accept("C", "c", T, (5,), "P")
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1))
    assert not driver.posted
    driver.offer("P", "p", T, (3,))
    assert len(driver.posts) == 1


def test_facts_say_what_was_moved(driver: CoreDriver) -> None:
    """Bytes, blocks, layers, ranks, times and the connectors' own stamps are on both ends."""
    driver.offer("P", "p", T, (3, 4))
    driver.accept("C", "c", T, (5, 6), "P")
    driver.now += 1
    driver.finish_all()
    for key in (("C", "c"), ("P", "p")):
        facts = driver.ends[key].facts
        assert (facts.kv_bytes, facts.blocks, facts.layers, facts.ranks) == (2 * 2 * 64, 2, 2, 1)
        assert (facts.first_post_ns, facts.landed_ns) == (100 * 10**9, 101 * 10**9)
        assert (facts.offered_ns, facts.accepted_ns, facts.transport, facts.copy_ns) == (7, 9, "hand", 1)
        assert facts.overlapped_bytes == 0


def test_every_rank_must_land() -> None:
    """Two ranks: one copy each between equal ranks; the end comes after the second."""
    driver = CoreDriver()
    driver.engine("P", ranks=2)
    driver.engine("C", ranks=2)
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (5,), "P")
    assert sorted((p.src.rank, p.dst.rank) for p in driver.posts.values()) == [(0, 0), (1, 1)]
    driver.finish(2)
    assert not driver.ends
    driver.finish(1)
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert driver.ends["C", "c"].facts.ranks == 2


def test_a_prefix_that_the_consumer_has_is_not_moved(driver: CoreDriver) -> None:
    """first_block skips the leading blocks; the source is the prompt's block of the same index."""
    driver.offer("P", "p", T, (3, 4, 7))
    driver.accept("C", "c", T, (9,), "P", first=2)
    (post,) = driver.posts.values()
    assert (post.src_blocks, post.dst_blocks) == ((7,), (9,))


def test_a_consumer_that_has_all_lands_at_once(driver: CoreDriver) -> None:
    """An accept without blocks ends at once, and the producer with its offer."""
    driver.begin("P", "p", T, Mode.READ)
    driver.accept("C", "c", T, (), "P", first=2)
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    driver.offer("P", "p", T, (3, 4))
    assert how(driver, "P", "p") == (Outcome.RELEASED, "")
    assert all_free(driver, "P", "C")


def test_n_consumers_release_once_after_the_last(driver: CoreDriver) -> None:
    """Two consumers of one transfer: both are filled, the producer is released after the second."""
    driver.offer("P", "p", T, (3,), consumers=2)
    driver.accept("C", "c0", T, (5,), "P", consumer=0)
    driver.finish_all()
    assert how(driver, "C", "c0") == (Outcome.LANDED, "")
    assert ("P", "p") not in driver.ends
    driver.accept("C", "c1", T, (6,), "P", consumer=1)
    driver.finish_all()
    assert how(driver, "P", "p") == (Outcome.RELEASED, "")
    assert driver.ends["P", "p"].facts.kv_bytes == 2 * 2 * 64
    assert driver.ends["C", "c1"].consumer == 1
    assert all_free(driver, "P", "C")


def test_one_failed_consumer_of_two_leaves_the_other_alone(driver: CoreDriver) -> None:
    """The second still lands; the producer ends after both and says that one failed."""
    driver.offer("P", "p", T, (3,), consumers=2)
    driver.accept("C", "c0", T, (5,), "P", consumer=0)
    driver.accept("C", "c1", T, (6,), "P", consumer=1)
    driver.finish(1, "link down")
    assert how(driver, "C", "c0") == (Outcome.FAILED, "TRANSFER_FAILED")
    assert ("P", "p") not in driver.ends
    driver.finish(2)
    assert how(driver, "C", "c1") == (Outcome.LANDED, "")
    assert how(driver, "P", "p") == (Outcome.FAILED, "TRANSFER_FAILED")
    assert all_free(driver, "P", "C")


# -- WRITE ----------------------------------------------------------------------------------


def test_write_follows_the_layers(driver: CoreDriver) -> None:
    """Each finished layer is posted by itself; the offer adds what the notices had not said."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5, 6), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3, 4), 1), layers=(0,), end=False)
    driver.step("P", 2, Chunk("p", 0, 2, (), 2), layers=(0,), end=False)
    seen = [(p.layers, p.src_blocks, p.dst_blocks) for p in driver.posted]
    assert seen == [((0,), (3,), (5,)), ((0,), (4,), (6,))]
    driver.finish_all()
    assert not driver.ends
    driver.offer("P", "p", T, (3, 4), mode=Mode.WRITE)
    assert driver.posted[-1].layers == (1,)
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert driver.ends["C", "c"].facts.overlapped_bytes == 2 * 64
    assert driver.ends["C", "c"].facts.kv_bytes == 4 * 64


def test_the_last_byte_may_be_before_the_end(driver: CoreDriver) -> None:
    """The consumer's end waits for the offer; its facts say when the bytes were there."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1))
    driver.now += 1
    driver.finish_all()
    assert not driver.ends
    driver.now += 2
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    facts = driver.ends["C", "c"].facts
    assert facts.overlapped_bytes == facts.kv_bytes
    assert (facts.first_post_ns, facts.last_byte_ns, facts.landed_ns) == (100 * 10**9, 101 * 10**9, 103 * 10**9)


def test_write_posts_what_is_ready_when_the_consumer_comes_last(driver: CoreDriver) -> None:
    """Layers that were ready before the accept go as soon as it is there, equal ranges together."""
    driver.begin("P", "p", T)
    driver.step("P", 1, Chunk("p", 0, 0, (3, 4), 2))
    driver.accept("C", "c", T, (5, 6), "P", mode=Mode.WRITE)
    (post,) = driver.posts.values()
    assert (post.layers, post.src_blocks) == ((0, 1), (3, 4))


def test_write_lands_only_after_the_offer(driver: CoreDriver) -> None:
    """Everything copied is not the end: the producer may still be preempted until it offers."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.finish_all()
    assert not driver.ends
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert how(driver, "P", "p") == (Outcome.RELEASED, "")


def test_lost_notices_cost_nothing_but_overlap(driver: CoreDriver) -> None:
    """Without any notice, with a layer of a step whose begin was lost, and after a gap: the offer completes it."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5, 6), "P", mode=Mode.WRITE)
    driver.core.notice(LayerReady("P", 0, 7, 0), driver.now)
    driver.step("P", 8, Chunk("p", 0, 1, (4,), 2))
    assert not driver.posted
    driver.offer("P", "p", T, (3, 4), mode=Mode.WRITE)
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


def test_chunks_that_come_before_their_begin_are_kept(driver: CoreDriver) -> None:
    """Notices overtake the begin (another socket): their blocks are held and copied once it comes."""
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.begin("P", "p", T)
    assert [p.src_blocks for p in driver.posted] == [(3,)]
    assert driver.leases.counts("P", 16).free == 15


def test_chunks_of_nobody_are_dropped_after_a_while() -> None:
    """Parked chunks are bounded in number and time."""
    driver = CoreDriver(Limits(park=1, max_parked=2))
    driver.engine("P")
    for i in range(5):
        driver.step("P", i, Chunk(f"p{i}", 0, 0, (i,), 1))
    assert len(driver.core.book.orphans) == 2
    driver.advance(1)
    assert not driver.core.book.orphans


def test_chunks_of_a_refused_begin_are_dropped(driver: CoreDriver) -> None:
    """At once, not after a while: whoever is refused often must not fill the place of those who are not."""
    driver.cancel(T)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    assert len(driver.core.book.orphans) == 1
    driver.begin("P", "p", T)
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "CANCELLED")
    assert not driver.core.book.orphans
    driver.step("P", 2, Chunk("p", 0, 0, (3,), 1))
    assert not driver.core.book.orphans


def test_every_rank_speaks_for_itself() -> None:
    """A layer that is ready on rank 0 is not posted on rank 1."""
    driver = CoreDriver()
    driver.engine("P", ranks=2)
    driver.engine("C", ranks=2)
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), rank=0)
    assert {p.src.rank for p in driver.posted} == {0}
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), rank=1, layers=(1,), end=False)
    assert [(p.src.rank, p.layers) for p in driver.posted] == [(0, (0, 1)), (1, (1,))]


# -- taking back ----------------------------------------------------------------------------


def test_preemption_fences_and_starts_again(driver: CoreDriver) -> None:
    """Fenced comes only when nothing of the attempt is in flight; the next attempt copies all anew."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0,), end=False)
    driver.retract("P", "p", 0, final=False)
    assert driver.cancelled == {1}
    assert not driver.fenced
    assert driver.leases.counts("P", 16).quarantined == 1
    driver.finish(1)
    assert driver.fenced == [("P", Fenced("p", 0))]
    assert driver.leases.counts("P", 16).free == 16
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(1,))  # late notices of the old attempt
    assert not driver.posts
    driver.step("P", 2, Chunk("p", 1, 0, (8,), 1))
    driver.offer("P", "p", T, (8,), mode=Mode.WRITE, attempt=1)
    assert [p.src_blocks for p in driver.posted[1:]] == [(8,)]
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert driver.ends["C", "c"].facts.kv_bytes == 2 * 64


def test_preemption_with_nothing_in_flight_is_fenced_at_once(driver: CoreDriver) -> None:
    """Also for a handle that kvd has never heard of, one that ended, and an attempt that is past."""
    driver.begin("P", "p", T)
    driver.retract("P", "p", 0, final=False)
    driver.retract("P", "p", 0, final=False)
    driver.retract("P", "never", 3, final=False)
    driver.cancel(T)
    driver.retract("P", "p", 1, final=False)
    assert [f for _, f in driver.fenced] == [Fenced("p", 0), Fenced("p", 0), Fenced("never", 3), Fenced("p", 1)]


def test_an_error_of_a_fenced_attempt_fails_nothing(driver: CoreDriver) -> None:
    """The old attempt's copy ends with an error during the fence: the consumer waits for the next attempt."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.retract("P", "p", 0, final=False)
    driver.finish(1, "cancelled")
    assert not driver.ends
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE, attempt=1)
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_aborted_producer_ends_both(driver: CoreDriver, in_flight: bool) -> None:
    """A final retraction: CANCELLED for the producer, PRODUCER_FAILED for the consumer, after the fence."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    if in_flight:
        driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.retract("P", "p", final=True, reason="CANCELLED")
    if in_flight:
        assert not driver.ends
        assert driver.leases.counts("C", 16).quarantined == 1
        driver.finish_all()
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "CANCELLED")
    assert how(driver, "C", "c") == (Outcome.FAILED, "PRODUCER_FAILED")
    assert all_free(driver, "P", "C")


def test_a_final_retraction_during_a_fence_answers_both(driver: CoreDriver) -> None:
    """Preempted, then aborted before the fence is done: fenced for the waiting worker, then the end."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.retract("P", "p", 0, final=False)
    driver.retract("P", "p", 0, final=True)
    assert not driver.fenced
    driver.finish_all()
    assert driver.fenced == [("P", Fenced("p", 0))]
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "CANCELLED")


def test_a_retraction_of_nothing_is_answered(driver: CoreDriver) -> None:
    """A final one of an unknown handle gets an end; of an ended handle, none."""
    driver.retract("P", "never", final=True)
    assert how(driver, "P", "never") == (Outcome.CANCELLED, "CANCELLED")
    driver.retract("P", "never", final=True)  # the driver fails on a second end


def test_a_consumer_can_give_itself_up(driver: CoreDriver) -> None:
    """A final retraction of a consumer's handle ends that consumer; the producer with its last one."""
    driver.offer("P", "p", T, (3,), consumers=2)
    driver.accept("C", "c0", T, (5,), "P", consumer=0)
    driver.accept("C", "c1", T, (6,), "P", consumer=1)
    driver.retract("C", "c0", final=True)
    driver.finish_all()
    assert how(driver, "C", "c0") == (Outcome.CANCELLED, "CANCELLED")
    assert how(driver, "C", "c1") == (Outcome.LANDED, "")
    assert how(driver, "P", "p") == (Outcome.FAILED, "CONSUMER_FAILED")
    driver.accept("C", "c2", U, (5,), "P")
    with pytest.raises(InvalidRequest):
        driver.retract("C", "c2", final=False)


def test_an_engine_that_speaks_of_an_ended_handle_is_told_again(driver: CoreDriver) -> None:
    """It may not have heard: it gets the same end, and nothing else happens."""
    driver.accept("C", "c", T, (5,), "P")
    driver.offer("P", "p", T, (3,))
    driver.finish_all()
    before = dict(driver.ends)
    driver.accept("C", "c", T, (5,), "P")
    driver.offer("P", "p", T, (3,))
    assert driver.told_again == [("C", "c"), ("P", "p")]
    assert driver.ends == before
    assert not driver.core.book.transfers
    assert all_free(driver, "P", "C")


@pytest.mark.parametrize("when", ["before all", "accepted", "begun", "in flight", "offered"])
def test_cancel_ends_both_in_every_phase(driver: CoreDriver, when: str) -> None:
    """From either end, at any time: every handle ends CANCELLED with the given reason, blocks are free."""
    if when == "before all":
        driver.cancel(T, "CANCELLED")
    if when in ("accepted", "in flight"):
        driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    if when in ("begun", "in flight"):
        driver.begin("P", "p", T)
    if when == "in flight":
        driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    if when == "offered":
        driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    if when != "before all":
        driver.cancel(T, "CANCELLED")
    driver.finish_all()
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "CANCELLED")
    assert how(driver, "C", "c") == (Outcome.CANCELLED, "CANCELLED")
    assert all_free(driver, "P", "C")
    assert not driver.core.book.transfers


# -- refusals -------------------------------------------------------------------------------


def test_a_transfer_is_used_once(driver: CoreDriver) -> None:
    """A second producer and a second consumer are refused, while it is open and after its end."""
    driver.offer("P", "p", T, (3,))
    driver.offer("P", "p2", T, (4,))
    driver.accept("C", "c", T, (5,), "P")
    driver.accept("C", "c2", T, (6,), "P")
    driver.finish_all()
    driver.offer("P", "p3", T, (4,))
    driver.accept("C", "c3", T, (6,), "P")
    for engine, handle in (("P", "p2"), ("P", "p3"), ("C", "c2"), ("C", "c3")):
        assert how(driver, engine, handle) == (Outcome.FAILED, "TRANSFER_USED"), handle
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert all_free(driver, "P", "C")


def test_the_same_said_twice_changes_nothing(driver: CoreDriver) -> None:
    """A participant that comes back says what is open again: no second end, no second copy."""
    for _ in range(2):
        driver.begin("P", "p", T)
        driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    for _ in range(2):
        driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    assert len(driver.posted) == 1
    driver.finish_all()
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


def test_a_handle_of_another_end_is_refused(driver: CoreDriver) -> None:
    """A live handle cannot name a second transfer: InvalidRequest, and the first is unharmed."""
    driver.begin("P", "p", T)
    with pytest.raises(InvalidRequest, match="in use"):
        driver.begin("P", "p", U)
    with pytest.raises(InvalidRequest, match="in use"):
        driver.accept("P", "p", T, (1,), "P")
    with pytest.raises(InvalidRequest, match="characters"):
        driver.begin("P", "", U)
    assert not driver.ends


def test_a_producer_whose_consumers_have_all_gone_is_ended_at_once(driver: CoreDriver) -> None:
    """Found by the state machine: the only consumer gave up, one too many waits, chunks came early."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.retract("C", "c", final=True)
    driver.accept("C", "extra", T, (6,), "P", mode=Mode.WRITE, consumer=1)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.begin("P", "p", T)
    assert how(driver, "P", "p") == (Outcome.FAILED, "CONSUMER_FAILED")
    assert how(driver, "C", "extra") == (Outcome.FAILED, "INVALID_REQUEST")
    assert all_free(driver, "P", "C")


def test_engines_that_differ_are_refused_and_named(driver: CoreDriver) -> None:
    """Another identity: the consumer hears what differs, the producer that its consumer failed."""
    driver.registry.hello("X", 1, PROTOCOL, {"model": "other"})
    driver.offer("P", "p", T, (3,))
    driver.accept("X", "x", T, (5,), "P")
    assert how(driver, "X", "x") == (Outcome.FAILED, "INCOMPATIBLE_ENGINES")
    assert "model: m != other" in driver.ends["X", "x"].detail
    assert how(driver, "P", "p") == (Outcome.FAILED, "CONSUMER_FAILED")


@pytest.mark.parametrize(
    ("ranks", "layers", "block_size", "name"), [(2, 2, 16, "ranks"), (1, 3, 16, "layers"), (1, 2, 32, "block_size")]
)
def test_memory_that_does_not_fit_is_refused_by_name(
    driver: CoreDriver, ranks: int, layers: int, block_size: int, name: str
) -> None:
    """Unequal ranks, layers or block size, whatever the identities say: refused at pairing."""
    driver.engine("X", ranks=ranks, layers=layers, block_size=block_size)
    driver.offer("P", "p", T, (3,))
    driver.accept("X", "x", T, (5,), "P")
    assert how(driver, "X", "x") == (Outcome.FAILED, "INCOMPATIBLE_ENGINES")
    assert name in driver.ends["X", "x"].detail
    assert not driver.posted


def test_an_engine_that_is_unknown_or_over_is_stale(driver: CoreDriver) -> None:
    """A ticket of an epoch that never was here, or has ended: STALE_EPOCH at once."""
    driver.accept("C", "c1", T, (5,), "nobody")
    driver.die("P")
    driver.accept("C", "c2", U, (5,), "P")
    assert how(driver, "C", "c1") == (Outcome.FAILED, "STALE_EPOCH")
    assert how(driver, "C", "c2") == (Outcome.FAILED, "STALE_EPOCH")
    assert not driver.core.book.transfers


@pytest.mark.parametrize(
    ("blocks", "first", "told"),
    [((5, 5), 0, "twice"), ((16,), 0, "of 16"), ((5, 6), 0, "on offer"), ((5,), 1, "on offer"), ((9,), 0, "held")],
)
def test_blocks_that_cannot_be_filled_are_refused(
    driver: CoreDriver, blocks: tuple[int, ...], first: int, told: str
) -> None:
    """Named twice, outside the pool, more than offered, or held for another transfer."""
    driver.offer("C", "own", U, (9,))
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, blocks, "P", first=first)
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    assert told in driver.ends["C", "c"].detail
    assert not driver.posted


@pytest.mark.parametrize(
    ("offered", "told"),
    [((), "without blocks"), ((3, 3), "twice"), ((16,), "of 16"), ((4,), "other blocks"), ((5,), "filled")],
)
def test_an_offer_that_cannot_be_is_refused(driver: CoreDriver, offered: tuple[int, ...], told: str) -> None:
    """Empty, a block twice, outside the pool, not what its chunks said, or being filled: both ends hear it."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    if told == "other blocks":
        driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    if told == "filled":
        driver.accept("P", "mine", U, (5,), "C")
    driver.offer("P", "p", T, offered, mode=Mode.WRITE)
    driver.finish_all()
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    assert told in driver.ends["P", "p"].detail


def test_the_ends_must_agree_on_the_transfer(driver: CoreDriver) -> None:
    """Another mode, another producer, a consumer that is not wanted: each refused."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.begin("C", "thief", T)
    assert how(driver, "C", "thief") == (Outcome.FAILED, "TICKET_REFUSED")
    driver.begin("P", "p", T, Mode.READ)
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    driver.accept("C", "d", U, (5,), "P", consumer=1)
    driver.offer("P", "q", U, (3,), consumers=1)
    assert how(driver, "C", "d") == (Outcome.FAILED, "INVALID_REQUEST")
    driver.accept("C", "e", U, (5,), "P", consumer=0)
    driver.finish_all()
    assert how(driver, "P", "q") == (Outcome.RELEASED, "")


@pytest.mark.parametrize("tid", [b"", b"short", bytes(17)])
def test_a_transfer_id_is_16_bytes(driver: CoreDriver, tid: bytes) -> None:
    """Anything else ends the handle at once."""
    driver.begin("P", "p", tid)
    driver.accept("C", "c", tid, (5,), "P")
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    with pytest.raises(InvalidRequest):
        driver.cancel(tid)


def test_new_transfers_are_refused_when_full_or_draining() -> None:
    """Too many parked: OVERLOADED. Draining: DRAINING, while an open one goes on."""
    driver = CoreDriver(Limits(max_parked=1))
    driver.engine("P")
    driver.engine("C")
    driver.accept("C", "c", T, (5,), "P")
    driver.accept("C", "d", U, (6,), "P")
    assert how(driver, "C", "d") == (Outcome.FAILED, "OVERLOADED")
    driver.core.draining = True
    driver.offer("P", "p", T, (3,))
    driver.offer("P", "q", b"transfer-0000003", (4,))
    driver.finish_all()
    assert how(driver, "P", "q") == (Outcome.FAILED, "DRAINING")
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


# -- deadlines ------------------------------------------------------------------------------


def test_a_lease_runs_out_unless_it_is_renewed(driver: CoreDriver) -> None:
    """Renewed, it holds past its first end; not renewed, both ends are EXPIRED."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.advance(29)
    driver.core.renew("P", [T, U], driver.now)
    driver.advance(29)
    assert not driver.ends
    driver.advance(1)
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert how(driver, "C", "c") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert "lease" in driver.ends["P", "p"].detail
    assert all_free(driver, "P", "C")


def test_an_expired_lease_frees_nothing_under_a_copy(driver: CoreDriver) -> None:
    """The lease ends while a copy runs: blocks stay quarantined until the copy is over."""
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (5,), "P")
    driver.core.book.timers.clear(Timer("transfer", T, 0))  # it would come at the same time as the lease's
    driver.advance(31)
    assert not driver.ends
    assert driver.cancelled == {1}
    assert driver.leases.counts("P", 16).quarantined == 1
    assert driver.leases.counts("C", 16).quarantined == 1
    driver.finish(1, "cancelled")
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert all_free(driver, "P", "C")


def test_an_offer_that_nobody_accepts_expires(driver: CoreDriver) -> None:
    """After the accept deadline; a late accept is told why."""
    driver.offer("P", "p", T, (3,))
    driver.advance(10)
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    driver.accept("C", "c", T, (5,), "P")
    assert how(driver, "C", "c") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert all_free(driver, "P", "C")


def test_an_accept_without_producer_expires(driver: CoreDriver) -> None:
    """Parked, bounded in time; a late producer is told why."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.advance(20)
    assert how(driver, "C", "c") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    driver.begin("P", "p", T)
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert not driver.core.book.transfers


def test_an_offer_waits_for_a_consumer_that_still_wants_it(driver: CoreDriver) -> None:
    """Its request may stand in decode's queue for longer than the accept deadline; a renewal of the producer's own
    does not count, and the last one's time runs out as the first would."""
    driver.offer("P", "p", T, (3,))
    for _ in range(5):
        driver.advance(6)
        driver.core.renew("C", [T], driver.now)
        driver.core.renew("P", [T], driver.now)
    assert not driver.ends
    driver.advance(6)
    driver.core.renew("P", [T], driver.now)
    driver.advance(4)
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert "not accepted" in driver.ends["P", "p"].detail


def test_an_accept_waits_for_a_producer_that_still_has_the_request(driver: CoreDriver) -> None:
    """WRITE: prefill's queue may be longer than the park deadline; renewals of the consumer's own do not count."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    for _ in range(3):
        driver.advance(15)
        driver.core.renew("P", [T], driver.now)
    assert not driver.ends
    driver.advance(10)
    driver.core.renew("C", [T], driver.now)
    driver.advance(10)
    assert how(driver, "C", "c") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert "not heard of" in driver.ends["C", "c"].detail


def test_a_copy_that_never_ends_is_fenced_and_torn_down(driver: CoreDriver) -> None:
    """Transfer deadline, then the fence's, then the session is torn down; only then the ends."""
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (5,), "P")
    driver.core.renew("P", [T], driver.now)
    driver.advance(30)
    assert driver.cancelled == {1}
    driver.advance(4.9)
    assert not driver.torn
    driver.advance(0.1)
    assert driver.torn == {1}
    assert not driver.ends
    driver.finish(1, "torn down")
    assert how(driver, "C", "c") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert how(driver, "P", "p") == (Outcome.EXPIRED, "TRANSFER_EXPIRED")
    assert all_free(driver, "P", "C")


def test_a_tie_is_broken_for_the_youngest_offer(driver: CoreDriver) -> None:
    """P has offered two that C does not accept, C has accepted one that P does not offer: after a
    quiet while the younger offer goes, then, if that did not help, the older."""
    driver.offer("P", "old", T, (1,))
    driver.advance(0.5)
    driver.offer("P", "young", U, (2,))
    driver.accept("C", "c", b"transfer-0000003", (5,), "P", mode=Mode.WRITE)
    driver.advance(1.9)
    assert not driver.ends
    driver.advance(0.2)
    assert how(driver, "P", "young") == (Outcome.CANCELLED, "TIE_BROKEN")
    assert ("P", "old") not in driver.ends
    driver.advance(2)
    assert how(driver, "P", "old") == (Outcome.CANCELLED, "TIE_BROKEN")
    driver.accept("C", "d", U, (6,), "P")
    assert how(driver, "C", "d") == (Outcome.CANCELLED, "TIE_BROKEN")


def test_while_something_moves_there_is_no_tie(driver: CoreDriver) -> None:
    """A producer that computes is not stuck: each notice puts the verdict off."""
    driver.offer("P", "p", T, (1,))
    driver.accept("C", "c", U, (5,), "P", mode=Mode.WRITE)
    for number in range(6):
        driver.advance(1)
        driver.step("P", number)
    assert not driver.ends
    driver.advance(2)
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "TIE_BROKEN")


def test_new_accepts_do_not_put_a_tie_off(driver: CoreDriver) -> None:
    """Another engine goes on accepting what a full producer cannot begin: that moves nothing, and the tie is broken in
    time all the same. An accept of what is on offer does move something."""
    driver.engine("D")
    driver.offer("P", "p", T, (1,))
    driver.offer("P", "q", U, (2,))
    driver.accept("C", "c", b"transfer-0000003", (5,), "P", mode=Mode.WRITE)
    driver.advance(1)
    driver.accept("D", "q", U, (9,), "P")
    driver.advance(1.5)
    assert not driver.ends
    for number in range(2):
        driver.accept("D", f"d{number}", number.to_bytes(16), (number,), "P", mode=Mode.WRITE)
        driver.advance(1)
    assert how(driver, "P", "p") == (Outcome.CANCELLED, "TIE_BROKEN")
    assert ("P", "q") not in driver.ends


def test_one_half_of_a_tie_is_none(driver: CoreDriver) -> None:
    """Offers that wait, or accepts that wait, alone are left to their own deadlines."""
    driver.offer("P", "p", T, (1,))
    driver.advance(9.9)
    assert not driver.ends


def test_ties_in_a_row_let_nobody_expire(driver: CoreDriver) -> None:
    """Twelve ties take longer than an offer may wait for its accept, and an accept for its producer: each tie
    gives those whom it spares their time anew."""
    driver.offer("P", "old", T, (1,))
    driver.accept("C", "c", U, (5,), "P", mode=Mode.WRITE)
    driver.advance(0.1)
    for number in range(12):
        driver.offer("P", f"young{number}", number.to_bytes(16), (2,))
        driver.advance(2.1)
    assert {end.reason for end in driver.ends.values()} == {"TIE_BROKEN"}
    assert set(driver.ends) == {("P", f"young{number}") for number in range(12)}


# -- death ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", ["P", "C"])
def test_a_dead_engine_ends_its_transfers(driver: CoreDriver, dead: str) -> None:
    """The peer hears PEER_LOST; memory is unmapped only when the copy from or to it is over."""
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, (5,), "P")
    driver.die(dead)
    assert driver.cancelled == {1}
    assert not driver.unmapped
    driver.finish(1, "cancelled")
    assert driver.unmapped == [dead]
    reasons = {"P": driver.ends["P", "p"].reason, "C": driver.ends["C", "c"].reason}
    assert reasons.pop(dead) == "ENGINE_DIED"
    assert list(reasons.values()) == ["PEER_LOST"]
    assert not len(driver.leases)
    assert not driver.core.book.transfers


def test_an_idle_engine_is_unmapped_at_its_death(driver: CoreDriver) -> None:
    """Once; a second end of the same engine is nothing."""
    driver.die("P")
    driver.die("P")
    assert driver.unmapped == ["P"]


def test_a_consumer_that_waits_for_a_dead_producer_is_told(driver: CoreDriver) -> None:
    """An accept whose producer dies before it began: PEER_LOST at once, not at the deadline."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.die("P")
    assert how(driver, "C", "c") == (Outcome.FAILED, "PEER_LOST")


def test_an_engine_that_is_lost_may_come_back(driver: CoreDriver) -> None:
    """Its transfers fail, its memory stays, and the next transfer works."""
    driver.begin("P", "p", T)
    driver.core.engine_lost("P", "no stream", driver.now)
    driver.take()
    assert how(driver, "P", "p") == (Outcome.FAILED, "PEER_LOST")
    assert not driver.unmapped
    driver.offer("P", "q", U, (3,))
    driver.accept("C", "c", U, (5,), "P")
    driver.finish_all()
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


def test_a_transfer_waits_for_memory_that_is_still_to_come(driver: CoreDriver) -> None:
    """After a restart of kvd engines attach before their regions are back: parked, then copied."""
    driver.engine("N", mapped=False)
    driver.offer("P", "p", T, (3,))
    driver.accept("N", "n", T, (5,), "P")
    assert not driver.posted
    driver.region("N", 0)
    assert len(driver.posts) == 1


def test_an_engine_may_hand_over_to_itself(driver: CoreDriver) -> None:
    """Producer and consumer on one engine, distinct blocks."""
    driver.offer("P", "p", T, (3,))
    driver.accept("P", "c", T, (5,), "P")
    driver.finish_all()
    assert how(driver, "P", "c") == (Outcome.LANDED, "")
    assert how(driver, "P", "p") == (Outcome.RELEASED, "")


def test_what_is_remembered_is_bounded() -> None:
    """Tombs and ended handles give way to newer ones; every table is empty at the end."""
    driver = CoreDriver(Limits(max_remembered=3))
    driver.engine("P")
    driver.engine("C")
    for i in range(10):
        tid = i.to_bytes(16, "big")
        driver.offer("P", f"p{i}", tid, (3,))
        driver.accept("C", f"c{i}", tid, (5,), "P")
        driver.finish_all()
        driver.cancel((100 + i).to_bytes(16, "big"))
    book = driver.core.book
    assert len(book.tombs) == 3
    assert len(book.ended_handles) == 3
    assert [len(book.transfers), len(book.by_engine), len(book.handles), len(book.ops), book.parked] == [0] * 5
    driver.advance(100)
    assert len(book.timers) == 0
