"""READ in the core: offers, accepts and copies, in the orders that happen. Time and copies by hand."""

import pytest

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from tests.unit.kvd.transfers.ends import T, all_free, how


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
