"""Fences that keep much of a pool get less time. The core alone: time and copies by hand."""

import pytest

from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import CoreDriver
from pdserve.rpc.errors import ConfigError

FENCE, SOON = 5.0, 0.5
BLOCKS = 16


def made(**limits: float) -> CoreDriver:
    """A core with two engines of 16 blocks; by default fences may keep half of them."""
    driver = CoreDriver(Limits(lease=300, accept=100, transfer=300, fence=FENCE, park=200, **limits))  # type: ignore[arg-type]
    for engine_id in ("P", "C"):
        driver.engine(engine_id, blocks=BLOCKS)
    return driver


def stuck(driver: CoreDriver, number: int, blocks: range, of: str = "P") -> int:
    """A READ from `of` to the other engine, of as many blocks, whose copy is in flight and does not end; the
    operation."""
    tid, to = b"transfer-%07d" % number, "C" if of == "P" else "P"
    before = set(driver.posts)
    driver.offer(of, f"p{number}", tid, tuple(blocks))
    driver.accept(to, f"c{number}", tid, tuple(blocks), of)
    (op_id,) = set(driver.posts) - before
    driver.cancel(tid)
    return op_id


def torn_after(driver: CoreDriver, op_id: int) -> float:
    """Seconds until an operation's session is torn down."""
    began = driver.now
    while op_id not in driver.torn:
        assert driver.now < began + 2 * FENCE
        driver.advance(1 / 16)  # which adds up exactly
    return driver.now - began


def test_half_of_the_pool_may_wait_for_its_whole_deadline() -> None:
    """The session serves others too, and most operations end soon after they are cancelled."""
    driver = made()
    assert torn_after(driver, stuck(driver, 1, range(8))) == FENCE


def test_more_than_that_gets_a_tenth() -> None:
    """One block more; the blocks are free when the operation has ended, as ever, and not before."""
    driver = made()
    op_id = stuck(driver, 1, range(9))
    assert torn_after(driver, op_id) == SOON
    assert driver.leases.counts("P", BLOCKS).quarantined == 9
    driver.finish(op_id, "torn down")
    assert driver.leases.counts("P", BLOCKS).free == driver.leases.counts("C", BLOCKS).free == BLOCKS


def test_several_fences_count_together_and_the_oldest_goes_first() -> None:
    """A fence that had its whole deadline before has a tenth from its own beginning, which is over: it goes at once,
    the one that made it too much after its own tenth."""
    driver = made()
    old = stuck(driver, 1, range(8))
    driver.advance(2.0)
    assert not driver.torn
    new = stuck(driver, 2, range(8, 12))
    driver.advance(0)
    assert driver.torn == {old}
    driver.advance(SOON - 1 / 16)
    assert driver.torn == {old}
    driver.advance(1 / 16)
    assert driver.torn == {old, new}


def test_a_block_under_two_fences_counts_once() -> None:
    """Two transfers of the same prompt's blocks: eight distinct ones are half of the pool, however often."""
    driver = made()
    tid = b"transfer-0000009"
    driver.offer("P", "p9", tid, tuple(range(8)), consumers=1)
    driver.accept("C", "c9", tid, tuple(range(8, 16)), "P")
    driver.offer("P", "p8", b"transfer-0000008", tuple(range(8)))
    driver.accept("C", "c8", b"transfer-0000008", tuple(range(8)), "P")
    driver.cancel(tid)
    driver.cancel(b"transfer-0000008")
    assert driver.leases.counts("P", BLOCKS).quarantined == 8
    assert driver.leases.counts("C", BLOCKS).quarantined == BLOCKS
    driver.advance(SOON)
    assert len(driver.torn) == 2, "C's pool is full of them: both sessions keep it"


def test_each_engine_counts_its_own() -> None:
    """A third engine's fences keep nothing of this one's pool."""
    driver = made()
    for engine_id in ("Q", "D"):
        driver.engine(engine_id, blocks=BLOCKS)
    mine = stuck(driver, 1, range(6))
    tid = b"transfer-0000002"
    driver.offer("Q", "q", tid, tuple(range(12)))
    driver.accept("D", "d", tid, tuple(range(12)), "Q")
    (theirs,) = set(driver.posts) - {mine}
    driver.cancel(tid)
    driver.advance(SOON)
    assert driver.torn == {theirs}


def test_a_preempted_producers_fence_counts_too() -> None:
    """Its consumer is not stopped; the copy from the blocks that the step wants back is."""
    driver = made()
    driver.offer("P", "p", b"transfer-0000001", tuple(range(12)))
    driver.accept("C", "c", b"transfer-0000001", tuple(range(12)), "P")
    (op_id,) = driver.posts
    driver.retract("P", "p", 0, final=False)
    assert torn_after(driver, op_id) == SOON


def test_the_share_is_an_operators() -> None:
    """All of it: never sooner. None, or less: refused."""
    driver = made(quarantine=1.0)
    assert torn_after(driver, stuck(driver, 1, range(16))) == FENCE
    with pytest.raises(ConfigError, match="quarantine"):
        Limits(quarantine=0.0)
