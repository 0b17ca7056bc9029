"""Leases, deadlines and ties of the core. Time by hand."""

from pdserve.kvd.book import Timer
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode
from tests.unit.kvd.transfers.ends import T, U, all_free, how


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
