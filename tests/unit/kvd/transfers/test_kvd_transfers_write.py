"""WRITE in the core: layers and chunks as their notices come, and as they do not. Time and copies by hand."""

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk, LayerReady
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from tests.unit.kvd.transfers.ends import T, how


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
