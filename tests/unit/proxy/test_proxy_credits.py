"""The ledger of KV tokens: exact about ours, careful about others', never negative."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.proxy.credits import Ledger, Reservation, blocks_round_up
from pdserve.proxy.types import EngineCard, Role


def card(engine_id: str = "e", total: int = 100) -> EngineCard:
    """An engine with a pool."""
    return EngineCard(engine_id, Role.DECODE, "m", "bytes", "a", b"", (), 100, 16, total)


def test_ours_is_known_without_a_beat() -> None:
    """A reservation counts at once and comes back at once, once."""
    ledger = Ledger()
    ledger.joined(card())
    held = ledger.reserve("e", 60)
    assert (ledger.available("e"), ledger.reserved("e"), ledger.legs("e")) == (40, 60, 1)
    with pytest.raises(ValueError, match="41 tokens asked"):
        ledger.reserve("e", 41)
    assert held.release()
    assert not held.release()
    assert (ledger.available("e"), ledger.reserved("e"), ledger.legs("e")) == (100, 0, 0)


def test_others_are_what_the_beat_says_beyond_ours() -> None:
    """Another proxy's tokens are not available; ours are not counted twice."""
    ledger = Ledger()
    ledger.joined(card())
    ledger.reserve("e", 30)
    ledger.reported("e", 40)  # 60 in use, 30 of them ours
    assert ledger.available("e") == 40


def test_a_release_is_available_before_the_next_beat() -> None:
    """The stale beat that still shows our finished request does not block its successor."""
    ledger = Ledger()
    ledger.joined(card())
    held = ledger.reserve("e", 100)
    ledger.reported("e", 0)
    held.release()
    assert ledger.available("e") == 100
    ledger.reported("e", 0)  # sampled before the release: the peak since the last beat covers it
    assert ledger.available("e") == 100
    ledger.reported("e", 0)  # but a second one means that somebody else is there
    assert ledger.available("e") == 0


def test_an_engine_that_came_back_starts_empty() -> None:
    """A reservation of its former life is void and does not come back as credit."""
    ledger = Ledger()
    ledger.joined(card())
    held = ledger.reserve("e", 60)
    ledger.left("e")
    assert ledger.available("e") == 0
    ledger.joined(card())
    held.release()
    assert ledger.available("e") == 100


@given(tokens=st.integers(1, 10**6), size=st.integers(1, 512))
def test_whole_blocks(tokens: int, size: int) -> None:
    """The least whole number of blocks that holds the tokens."""
    whole = blocks_round_up(tokens, size)
    assert whole % size == 0
    assert 0 <= whole - tokens < size


class LedgerMachine(RuleBasedStateMachine):
    """Random reservations, releases and beats of one engine."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.joined(card(total=1000))
        self.held: list[Reservation] = []

    @rule(share=st.floats(0.0, 1.0))
    def reserve(self, share: float) -> None:
        """Any part of what is available."""
        self.held.append(self.ledger.reserve("e", int(self.ledger.available("e") * share)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any reservation, perhaps twice."""
        held = data.draw(st.sampled_from(self.held))
        assert held.release()
        assert not held.release()
        self.held.remove(held)

    @rule(free=st.integers(0, 1000))
    def beat(self, free: int) -> None:
        """Whatever the engine says."""
        self.ledger.reported("e", free)

    @invariant()
    def adds_up(self) -> None:
        """What is reserved is what is held; available is between nothing and the rest of the pool."""
        ours = sum(held.tokens for held in self.held)
        assert self.ledger.reserved("e") == ours
        assert self.ledger.legs("e") == len(self.held)
        assert 0 <= self.ledger.available("e") <= 1000 - ours

    def teardown(self) -> None:
        """All given back and an idle engine's beats: everything is available."""
        for held in self.held:
            held.release()
        self.ledger.reported("e", 1000)
        assert self.ledger.available("e") == 1000


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
