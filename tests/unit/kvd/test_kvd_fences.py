"""How long fences take, and what bounds them. The core alone: time and copies by hand."""

import random

import pytest

from pdserve.kvd.fences import FenceCounts
from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import CoreDriver

T = b"transfer-0000001"
FENCE = 5.0


@pytest.fixture
def driver() -> CoreDriver:
    """A core with a producer engine P and a consumer engine C; a fence is overdue after FENCE seconds."""
    made = CoreDriver(Limits(lease=300, accept=100, transfer=300, fence=FENCE, park=200))
    made.engine("P")
    made.engine("C")
    return made


def copying(driver: CoreDriver, tid: bytes = T) -> int:
    """A READ whose copy is in flight; the operation."""
    driver.offer("P", f"p{tid!r}", tid, (3, 4))
    driver.accept("C", f"c{tid!r}", tid, (5, 6), "P")
    (op_id,) = driver.posts
    return op_id


def test_a_fence_is_timed_from_the_stop_until_nothing_is_in_flight(driver: CoreDriver) -> None:
    """Both ends' fences last as long as the copy: counted, with the longest and the sum."""
    op_id = copying(driver)
    driver.cancel(T)
    driver.advance(1.25)
    fences = driver.core.book.fences
    assert fences == FenceCounts()
    driver.finish(op_id, "cancelled")
    assert fences == FenceCounts(count=2, waited=2, longest=1.25, total=2.5)


def test_a_stop_with_nothing_in_flight_is_a_fence_without_a_wait(driver: CoreDriver) -> None:
    """Counted, but not among those that waited, and it took no time."""
    driver.offer("P", "p", T, (3,))
    driver.advance(2)
    driver.cancel(T)
    assert driver.core.book.fences == FenceCounts(count=1)


def test_a_preemption_is_a_fence_of_the_producer(driver: CoreDriver) -> None:
    """Only the producer's end is fenced; the next attempt's fence is another one."""
    op_id = copying(driver)
    handle = f"p{T!r}"
    driver.retract("P", handle, 0, final=False)
    driver.advance(0.5)
    driver.finish(op_id, "cancelled")
    driver.retract("P", handle, 1, final=False)
    assert driver.core.book.fences == FenceCounts(count=2, waited=1, longest=0.5, total=0.5)


def test_a_fence_past_its_deadline_is_counted_once(driver: CoreDriver) -> None:
    """The session is torn down at the deadline, not before, and again while it lasts; counted once for each end."""
    op_id = copying(driver)
    driver.cancel(T)
    driver.advance(FENCE - 0.001)
    assert not driver.torn
    driver.advance(0.001)
    assert driver.torn == {op_id}
    driver.advance(3 * FENCE)
    assert driver.core.book.fences.torn_down == 2
    driver.finish(op_id, "torn down")
    assert driver.core.book.fences == FenceCounts(2, 2, 4 * FENCE, 8 * FENCE, 2)


def test_a_fence_takes_at_most_its_deadline_and_the_closing_of_the_session() -> None:
    """However late copies would end, whatever stops them: no fence lasts longer than Limits.fence plus the closing."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, closing, late = random.Random(seed), 0.25, 0
    for number in range(100):
        driver = CoreDriver(Limits(lease=300, accept=100, transfer=300, fence=FENCE, park=200))
        driver.engine("P")
        driver.engine("C")
        op_id = copying(driver)
        match chance.randrange(4):
            case 0:
                driver.cancel(T)
            case 1:
                driver.retract("P", f"p{T!r}", 0, final=False)
            case 2:
                driver.retract("C", f"c{T!r}", 0, final=True)
            case _:
                driver.die("P")
        own = chance.uniform(0, 3 * FENCE)  # when the copy would end by itself
        before = min(own, FENCE)
        driver.advance(before)
        if op_id in driver.torn:
            late += 1
            driver.advance(min(own - before, closing))
        driver.finish(op_id, "cancelled")
        fences = driver.core.book.fences
        assert fences.count >= 1, number
        assert fences.longest == pytest.approx(min(own, FENCE + closing)), number
        assert fences.longest <= FENCE + closing + 1e-6, number
        assert (fences.torn_down > 0) == (own > FENCE), number
    assert 0 < late < 100
