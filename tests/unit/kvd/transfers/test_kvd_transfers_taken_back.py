"""A transfer that one of its ends takes back, or an operator ends. The core alone: time and copies by hand."""

import pytest

from pdserve.kvd.client.messages import Fenced, Outcome
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest
from tests.unit.kvd.transfers.ends import T, U, all_free, how


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
