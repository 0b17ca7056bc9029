"""The ledger: each handle gets exactly one end, whatever crosses what."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.kvd.client.ledger import Ledger
from pdserve.kvd.client.messages import Accept, Begin, End, Fenced, Offer, Outcome, Request, Retract
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import KvdUnavailable

TID = bytes(16)


def begin(handle: str) -> Begin:
    return Begin(handle, TID, Mode.WRITE)


def offer(handle: str) -> Offer:
    return Offer(handle, TID, 0, (1,), 1, Mode.WRITE)


def accept(handle: str, consumer: int = 0) -> Accept:
    return Accept(handle, TID, consumer, (1,), 0, ticket=b"t")


def end(handle: str) -> End:
    return End(handle, TID, Outcome.RELEASED)


def test_only_what_was_open_before_is_overdue() -> None:
    """A handle is said again with all that was said of it, when it has been open for a whole round."""
    ledger = Ledger(strict=True)
    ledger.sending(begin("a"))
    assert ledger.overdue() == []
    ledger.sending(offer("a"))
    ledger.sending(accept("b"))
    assert ledger.overdue() == [begin("a"), offer("a")]
    ledger.ended(end("a"))
    assert ledger.overdue() == [accept("b")]


def test_an_offer_that_crossed_its_end_is_not_sent() -> None:
    """A handle that ended, but whose end was not drained, is not opened again."""
    ledger = Ledger(strict=True)
    assert ledger.sending(begin("a"))
    assert ledger.ended(end("a"))
    assert not ledger.sending(offer("a"))
    assert ledger.open == 0
    assert ledger.abandon(KvdUnavailable("gone")) == []


def test_a_second_end_is_dropped_and_counted() -> None:
    """Duplicates and ends of unknown handles do not reach the scheduler."""
    ledger = Ledger(strict=True)
    ledger.sending(accept("a"))
    assert ledger.ended(end("a"))
    assert not ledger.ended(end("a"))
    assert not ledger.ended(end("never sent"))
    assert ledger.duplicates == 2


def test_an_observer_hears_every_end() -> None:
    """Host and workers open nothing and hear all."""
    ledger = Ledger(strict=False)
    assert ledger.ended(end("a"))


def test_abandon_ends_everything_open_once() -> None:
    """When kvd is gone each open handle ends once, as what it was."""
    ledger = Ledger(strict=True)
    ledger.sending(begin("p"))
    ledger.sending(offer("p"))
    ledger.sending(accept("c", consumer=3))
    ends = {e.handle: e for e in ledger.abandon(KvdUnavailable("gone"))}
    assert set(ends) == {"p", "c"}
    assert (ends["p"].producer, ends["c"].producer, ends["c"].consumer) == (True, False, 3)
    assert {e.reason for e in ends.values()} == {"KVD_UNAVAILABLE"}
    assert ledger.abandon(KvdUnavailable("again")) == []


def test_an_accept_waits_for_the_fences_of_preempted_attempts() -> None:
    """Blocks under a fence are not named as a consumer's before kvd has let them go."""
    ledger = Ledger(strict=True)
    ledger.sending(begin("p"))
    assert ledger.sending(Retract("p", 0, False, "X"))
    assert not ledger.sending(accept("c"))
    assert ledger.fenced(Fenced("other", 0)) == []
    assert ledger.fenced(Fenced("p", 0)) == [accept("c")]
    assert ledger.sending(accept("d"))


def test_a_held_accept_of_an_ended_transfer_is_not_sent() -> None:
    """What ended while its accept was held stays ended."""
    ledger = Ledger(strict=True)
    ledger.sending(begin("p"))
    ledger.sending(Retract("p", 0, False, "X"))
    ledger.sending(accept("c"))
    ledger.abandon(KvdUnavailable("gone"))
    assert ledger.fenced(Fenced("p", 0)) == []


def test_again_repeats_what_is_open_in_order() -> None:
    """A new stream to the same kvd hears everything of open handles, and nothing of ended ones."""
    ledger = Ledger(strict=True)
    said: list[Request] = [begin("p"), accept("c"), Retract("p", 0, False, "X"), offer("p")]
    for message in said:
        ledger.sending(message)
    ledger.ended(end("c"))
    assert ledger.again() == [begin("p"), Retract("p", 0, False, "X"), offer("p")]


class LedgerMachine(RuleBasedStateMachine):
    """Random sends, ends, drains and losses against a count per handle."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(strict=True)
        self.opened: set[str] = set()
        self.ends: dict[str, int] = {}
        self.undrained: list[str] = []
        self.known_ended: set[str] = set()

    @rule(number=st.integers(0, 5), kind=st.sampled_from([begin, offer, accept]))
    def send(self, number: int, kind: type) -> None:
        handle = str(number)
        if handle in self.known_ended:
            return  # a user who has seen the end sends no more
        self.ledger.sending(kind(handle))
        if handle not in self.ends:
            self.opened.add(handle)

    @rule(number=st.integers(0, 5))
    def end(self, number: int) -> None:
        if self.ledger.ended(end(str(number))):
            self._delivered(str(number))

    @rule()
    def lose(self) -> None:
        for ended in self.ledger.abandon(KvdUnavailable("gone")):
            self._delivered(ended.handle)
        assert self.opened == set(self.ends)

    @rule()
    def drain(self) -> None:
        self.known_ended.update(self.undrained)
        self.ledger.drained(self.undrained)
        self.undrained = []

    def _delivered(self, handle: str) -> None:
        self.ends[handle] = self.ends.get(handle, 0) + 1
        self.undrained.append(handle)

    @invariant()
    def one_end_each(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        assert set(self.ends) <= self.opened
        assert self.ledger.open == len(self.opened - set(self.ends))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
