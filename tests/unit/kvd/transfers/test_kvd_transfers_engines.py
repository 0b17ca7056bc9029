"""Engines that die, are lost, or come late, and what the core keeps of them. Time and copies by hand."""

import pytest

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from tests.unit.kvd.transfers.ends import T, U, how


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
