"""When a call is sent again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client import (
    DeadlinePassed,
    Draining,
    EngineDied,
    InvalidRequest,
    NoEngines,
    Overloaded,
    PdserveError,
    PeerLost,
    Retry,
    Unavailable,
)
from pdserve.client._retry import Attempts

POLICY = Retry(attempts=3, first_delay_seconds=1.0, longest_delay_seconds=1.5)


@pytest.mark.parametrize("error", [Unavailable("x"), NoEngines("x"), Draining("x"), EngineDied("x")])
def test_unavailable_is_sent_again_until_the_attempts_are_used_up(error: PdserveError) -> None:
    """Every kind of UNAVAILABLE is retried, with doubling and bounded waits, then raised as it is."""
    attempts = Attempts(POLICY, 100.0)
    attempts.begin(0.0)
    assert attempts.after(error, 0.0, random=0.0) == 0.5
    attempts.begin(1.0)
    assert attempts.after(error, 1.0, random=0.5) == pytest.approx(1.125)  # bound 2, cut to 1.5
    attempts.begin(2.0)
    with pytest.raises(type(error)) as caught:
        attempts.after(error, 2.0, random=0.0)
    assert caught.value is error


@pytest.mark.parametrize("error", [InvalidRequest("x"), Overloaded("x"), PeerLost("x"), PdserveError("x")])
def test_nothing_else_is_sent_again(error: PdserveError) -> None:
    """An error that is not UNAVAILABLE reaches the caller at once: the proxy has retried what it can."""
    attempts = Attempts(POLICY, 100.0)
    attempts.begin(0.0)
    with pytest.raises(type(error)):
        attempts.after(error, 0.0, random=0.0)


def test_the_deadline_covers_all_sends() -> None:
    """Later sends get what is left of the one deadline, and no wait goes past it."""
    attempts = Attempts(Retry(attempts=9, first_delay_seconds=1.0), 10.0)
    assert attempts.begin(100.0) == 10.0
    assert attempts.begin(104.0) == 6.0
    with pytest.raises(Unavailable):
        attempts.after(Unavailable("x"), 109.9, random=0.0)
    with pytest.raises(DeadlinePassed):
        attempts.begin(110.0)


@given(st.integers(1, 20), st.floats(0, 10), st.floats(0, 10), st.integers(0, 2**32))
def test_waits_are_bounded_and_sends_counted(sends: int, first: float, longest: float, seed: int) -> None:
    """Whatever the policy: at most `attempts` sends, and no wait above the bound."""
    draw = random.Random(seed)
    attempts = Attempts(Retry(sends, first, longest), 1e9)
    count = 0
    try:
        while True:
            attempts.begin(0.0)
            count += 1
            assert 0 <= attempts.after(Unavailable("x"), 0.0, draw.random()) <= longest
    except Unavailable:
        assert count == sends


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    """No send at all, or a negative wait, is refused when the policy is made."""
    with pytest.raises(InvalidRequest):
        Retry(attempts=0)
    with pytest.raises(InvalidRequest):
        Retry(first_delay_seconds=-1)
