"""When a call is sent again."""

import math
import random
from typing import Any

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


@pytest.mark.parametrize("error", [Unavailable("x"), NoEngines("x"), Draining("x")])
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


def test_a_prompt_that_may_have_killed_an_engine_is_risked_once_more() -> None:
    """And not on every engine that is started in a dead one's place, however much time is left."""
    attempts = Attempts(Retry(), 600.0)
    attempts.begin(0.0)
    attempts.after(EngineDied("the first"), 0.0, random=0.0)
    attempts.begin(1.0)
    attempts.after(NoEngines("none yet"), 1.0, random=0.0)
    attempts.begin(2.0)
    with pytest.raises(EngineDied, match="the second"):
        attempts.after(EngineDied("the second"), 2.0, random=0.0)


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


def sends(policy: Retry, timeout: float, random: float) -> list[float]:
    """Moments of all sends of a call that nobody takes and that is refused at once, seconds from the first."""
    attempts, now, moments = Attempts(policy, timeout), 1000.0, list[float]()
    try:
        while True:
            attempts.begin(now)
            moments.append(now - 1000.0)
            now += attempts.after(Unavailable("x"), now, random)
    except Unavailable:
        return moments


@pytest.mark.parametrize("random", [0.0, 0.999])
def test_by_default_an_engines_restart_is_outlived(random: float) -> None:
    """Somebody who comes back after 15 s, or 45, is asked within two seconds of it, whatever the jitter; after a minute
    the error reaches the caller."""
    moments = sends(Retry(), 600.0, random)
    assert 55.0 < moments[-1] <= 60.0
    for back in (0.5, 15.0, 45.0):
        assert min(moment for moment in moments if moment >= back) <= back + 2.0
    assert len(moments) < 100, "and nobody is flooded"


@given(st.floats(0.001, 100), st.floats(0, 100), st.floats(0, 0.999))
def test_no_send_is_later_than_either_bound(timeout: float, seconds: float, random: float) -> None:
    """The call's own timeout goes over the policy's seconds, and the other way round."""
    moments = sends(Retry(seconds=seconds, first_delay_seconds=0.3), timeout, random)
    assert moments[0] == 0.0
    assert all(0 <= moment <= min(seconds, timeout) + 1e-9 for moment in moments)


def test_no_seconds_is_one_send() -> None:
    """As attempts=1."""
    assert sends(Retry(seconds=0.0), 600.0, 0.0) == sends(Retry(attempts=1), 600.0, 0.0) == [0.0]


def test_who_wants_to_know_is_told_of_what_is_sent_again() -> None:
    """With the wait; the failure that reaches the caller is not told of as well."""
    told: list[tuple[str, float]] = []
    attempts = Attempts(POLICY, 100.0, lambda error, seconds: told.append((error.reason, seconds)))
    for error in (NoEngines("x"), Draining("x")):
        attempts.begin(0.0)
        attempts.after(error, 0.0, random=0.0)
    attempts.begin(0.0)
    with pytest.raises(Unavailable):
        attempts.after(Unavailable("x"), 0.0, random=0.0)
    assert told == [("NO_ENGINES", 0.5), ("DRAINING", 0.75)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first_delay_seconds": -1},
        {"longest_delay_seconds": -1},
        {"seconds": -1},
        {"seconds": math.nan},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """No send at all, or a time that is none, is refused when the policy is made."""
    with pytest.raises(InvalidRequest):
        Retry(**wrong)
