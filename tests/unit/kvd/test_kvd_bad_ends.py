"""What the end of a consumer that was given up says of how far its hand-over had come."""

import pytest

from pdserve.kvd.client.messages import Facts, Outcome
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode

T = b"transfer-0000001"
BEGUN_NS, NOW_S = 100 * 10**9, 1.0
"""The driver's clock begins at 100 s."""


@pytest.fixture
def driver() -> CoreDriver:
    """A producer P and a consumer C, of one rank and two layers."""
    driver = CoreDriver()
    driver.engine("P")
    driver.engine("C")
    return driver


def bad(driver: CoreDriver) -> Facts:
    """Of the consumer's end, which is not good."""
    end = driver.ends["C", "c"]
    assert end.outcome is not Outcome.LANDED
    assert (end.facts.landed_ns, end.facts.blocks, end.facts.layers, end.facts.ranks) == (0, 0, 0, 0)
    return end.facts


def test_a_copy_that_failed(driver: CoreDriver) -> None:
    """WRITE, one layer of two in place: its bytes and time, the first post, no last byte."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1), end=False)
    driver.now += NOW_S
    driver.finish(1)
    driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    driver.now += NOW_S
    driver.finish(2, "link down")
    assert bad(driver) == Facts(
        kv_bytes=64, copy_ns=2, transport="hand", first_post_ns=BEGUN_NS, overlapped_bytes=64,
        offered_ns=7, accepted_ns=9, lanes="by hand",
    )  # fmt: skip


def test_a_wait_for_the_offer_that_failed(driver: CoreDriver) -> None:
    """WRITE, everything in place and no offer: the last byte has its time."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1))
    driver.now += NOW_S
    driver.finish_all()
    driver.now += NOW_S
    driver.die("P")
    facts = bad(driver)
    assert (facts.first_post_ns, facts.last_byte_ns) == (BEGUN_NS, BEGUN_NS + int(NOW_S * 10**9))
    assert facts.kv_bytes == facts.overlapped_bytes == 2 * 64


def test_what_an_attempt_before_had_copied_is_gone(driver: CoreDriver) -> None:
    """WRITE whose producer was preempted, and then died: no byte of the new attempt is in place."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0, 1))
    driver.finish_all()
    driver.retract("P", "p", final=False)
    driver.die("P")
    facts = bad(driver)
    assert (facts.kv_bytes, facts.last_byte_ns) == (0, 0)


def test_nothing_was_begun(driver: CoreDriver) -> None:
    """READ whose producer dies before its offer: only decode's own stamp."""
    driver.begin("P", "p", T, Mode.READ)
    driver.accept("C", "c", T, (5,), "P")
    driver.die("P")
    assert bad(driver) == Facts(accepted_ns=9)
