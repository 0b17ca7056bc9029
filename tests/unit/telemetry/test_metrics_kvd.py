"""What kvd counts as it happens: from the core's own effects, which are carried out by hand."""

import dataclasses

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.counts import Carried, Counts
from pdserve.kvd.effects import Effect, Tell
from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.transport.port import Moved
from pdserve.kvd.types import Mode
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.metrics import Metrics
from tests.unit.telemetry.exposed import Exposed, parse

T, U = b"transfer-0000001", b"transfer-0000002"


class Counting(CoreDriver):
    """A core with a producer P and a consumer C, whose effects are counted as the node counts them."""

    def __init__(self) -> None:
        super().__init__(Limits(lease=30, accept=10, transfer=30, fence=5, park=20, tie=2))
        self.counts = Counts()
        self.engine("P")
        self.engine("C")

    def _take(self, effect: Effect) -> None:
        self.counts.effect(effect)
        super()._take(effect)

    def shown(self) -> Exposed:
        """What Prometheus would see of it."""
        return parse(Metrics(names.KVD, c.KVD, self.counts.tally).expose())


def test_a_broken_tie_is_counted_once() -> None:
    """One offer given up for another: one tie, though both its ends hear of it."""
    driver = Counting()
    driver.accept("C", "c2", U, (5,), "P")
    driver.offer("P", "p1", T, (1,))
    driver.advance(2.5)
    assert driver.ends["P", "p1"].reason == "TIE_BROKEN"
    shown = driver.shown()
    assert shown.of(c.KVD_TIES) == 1
    assert shown.by(c.KVD_ENDED, "end", "outcome", "reason", "mode") == {
        ("producer", "cancelled", "TIE_BROKEN", "read"): 1
    }


def test_every_end_has_the_mode_of_its_transfer() -> None:
    """Also of several consumers; a handle that never got a transfer has none, and no transport."""
    driver = Counting()
    driver.engine("D")
    driver.begin("P", "p", T, Mode.WRITE, consumers=2)
    driver.offer("P", "p", T, (3, 4), mode=Mode.WRITE, consumers=2)
    driver.accept("C", "c", T, (5, 6), "P", mode=Mode.WRITE)
    driver.accept("D", "d", T, (5, 6), "P", mode=Mode.WRITE, consumer=1)
    driver.finish_all()
    driver.core.draining = True
    driver.offer("P", "late", U, (7,))
    shown = driver.shown()
    assert shown.by(c.KVD_ENDED, "end", "outcome", "reason", "mode", "transport") == {
        ("consumer", "landed", "", "write", "hand"): 2,
        ("producer", "released", "", "write", "hand"): 1,
        ("producer", "failed", "KVD_UNAVAILABLE", "none", ""): 1,
    }
    assert shown.of(c.KVD_TRANSFER_SECONDS, "_count", mode="write", transport="hand") == 2


def test_an_end_that_is_told_again_counts_once() -> None:
    """Who asks for the end of what is over hears it again; that is no second end."""
    driver = Counting()
    driver.offer("P", "p", T, (1,))
    driver.cancel(T)
    driver.offer("P", "p", T, (1,))
    assert driver.told_again == [("P", "p")]
    assert driver.shown().of(c.KVD_ENDED) == 1


def test_a_made_up_reason_is_no_label() -> None:
    """A client's cancel may carry any word."""
    driver = Counting()
    driver.offer("P", "p", T, (1,))
    driver.cancel(T, reason="whatever-17")
    assert driver.ends["P", "p"].reason == "whatever-17"
    assert driver.shown().by(c.KVD_ENDED, "reason") == {("INTERNAL",): 1}


def test_landing_without_a_stamp_is_not_timed() -> None:
    """An engine that does not say when it reserved its blocks: nothing is guessed."""
    driver = Counting()
    driver.offer("P", "p", T, (1,))
    driver.accept("C", "c", T, (2,), "P")
    driver.finish_all()
    end = driver.ends["C", "c"]
    assert end.outcome is Outcome.LANDED
    counts = Counts()
    unstamped = dataclasses.replace(end, facts=dataclasses.replace(end.facts, accepted_ns=0))
    counts.effect(Tell("C", unstamped, mode=Mode.READ))
    shown = parse(Metrics(names.KVD, c.KVD, counts.tally).expose())
    assert (shown.of(c.KVD_ENDED), shown.of(c.KVD_TRANSFER_SECONDS, "_count")) == (1, 0)


def test_copies_are_told_apart() -> None:
    """Done, cancelled, failed; what a copy moved before it was cancelled counts as bytes all the same."""
    counts = Counts()
    counts.copy(Moved(640, 2_000_000_000), Mode.READ, "shm", "")
    counts.copy(Moved(64, 500_000_000, cancelled=True), Mode.READ, "shm", "cancelled")
    counts.copy(Moved(0, 0), Mode.WRITE, "", "cancelled")
    counts.copy(Moved(0, 0), Mode.WRITE, "sim", "the link failed")
    counts.copy(Moved(32, 1_000_000_000, lanes="tcp/eth0"), Mode.READ, "nixl", "")
    shown = parse(Metrics(names.KVD, c.KVD, counts.tally).expose())
    assert shown.by(c.KVD_COPIES, "mode", "transport", "result") == {
        ("read", "nixl", "done"): 1,
        ("read", "shm", "done"): 1,
        ("read", "shm", "cancelled"): 1,
        ("write", "", "cancelled"): 1,
        ("write", "sim", "failed"): 1,
    }
    assert shown.of(c.KVD_COPIED_BYTES) == 736
    assert shown.of(c.KVD_COPY_SECONDS) == 3.5
    assert shown.by(c.KVD_COPIED_BYTES, "transport", "lanes")["nixl", "tcp/eth0"] == 32
    assert counts.carried == {
        ("shm", ""): Carried(2, 704, 2_500_000_000),
        ("sim", ""): Carried(1, 0, 0),
        ("nixl", "tcp/eth0"): Carried(1, 32, 1_000_000_000),
    }
