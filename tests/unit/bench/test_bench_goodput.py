"""Attainment, good rate, goodput, and the search for it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.goodput import Search, attainment, fewest, good_rate, goodput_of, unproven, wilson
from pdserve.bench.results import Goodput, Tried
from pdserve.rpc.errors import ConfigError


def search(steps: Search, curve: Callable[[float], float], count: int = 1000) -> Goodput:
    """What a search finds on a curve of attainments."""
    going = steps.steps()
    rate = next(going)
    while True:
        try:
            rate = going.send((curve(rate), count))
        except StopIteration as ended:
            found: Goodput = ended.value
            return found


def test_a_failed_request_attains_nothing() -> None:
    """Three of five are good: one missed its ITL, one failed."""
    assert attainment([(), ("itl",), ("error",), (), ()]) == 0.6
    assert good_rate(0.6, 8.0) == pytest.approx(4.8)
    assert attainment([]) == 0.0


def test_bisection_finds_the_edge() -> None:
    """Attainment falls through 90 % at 7.3: the value lies below, the interval around it, at most 5 % wide."""
    found = search(Search(1.0, 16.0), lambda rate: 1.0 if rate <= 7.3 else 0.5)
    assert found.high is not None
    assert found.low <= found.value <= 7.3 < found.high
    assert (found.high - found.value) / found.high <= 0.05
    assert [one.rate for one in found.tried][:3] == [1.0, 16.0, 8.5]
    assert "bisection to" in found.why


def test_a_lowest_rate_that_falls_short_ends_the_search() -> None:
    """The goodput is below it; nothing is made up."""
    found = search(Search(2.0, 16.0), lambda _: 0.1)
    assert (found.value, found.low, found.high, len(found.tried)) == (0.0, 0.0, 2.0, 1)
    assert "below it" in found.why


def test_a_highest_rate_that_holds_ends_the_search() -> None:
    """The goodput is at least that; there is no upper bound."""
    found = search(Search(2.0, 16.0), lambda _: 1.0)
    assert (found.value, found.low, found.high, len(found.tried)) == (16.0, 16.0, None, 2)
    assert "at least" in found.why


def test_the_number_of_rates_is_bounded() -> None:
    """A tolerance too fine for it ends after `most` rates and says so."""
    found = search(Search(1.0, 16.0, tolerance=1e-9, most=6), lambda rate: float(rate < 5))
    assert len(found.tried) == 6
    assert "ended after 6 rates" in found.why


def test_few_requests_widen_the_interval() -> None:
    """88 % of 25 may well be 90 % in truth: that rate is no upper bound, and 92 % no lower one."""
    shares = {1.0: 1.0, 2.0: 0.92, 3.0: 0.88, 4.0: 0.4}
    few, many = (goodput_of([Tried(*pair, n) for pair in shares.items()], 0.9, "") for n in (25, 10_000))
    assert (few.low, few.value, few.high) == (0.0, 2.0, 4.0)
    assert (many.low, many.value, many.high) == (2.0, 2.0, 3.0)


def test_each_rate_has_its_own_requests() -> None:
    """A rate that held with 1000 good requests is a lower bound, though another one was tried with ten."""
    found = goodput_of(
        [Tried(1.0, 1.0, 1000), Tried(2.0, 1.0, 10), Tried(3.0, 0.8, 10), Tried(4.0, 0.8, 1000)], 0.9, ""
    )
    assert (found.low, found.value, found.high) == (1.0, 2.0, 4.0)


@given(st.floats(0.01, 0.999))
def test_the_fewest_requests_that_prove_a_threshold(threshold: float) -> None:
    """All good they hold it by more than their interval, and one fewer do not; of 90 % it takes 35."""
    assert fewest(0.9) == 35
    assert fewest(1.0) is None
    count = fewest(threshold)
    assert count is not None
    assert wilson(1.0, count)[0] >= threshold - 1e-12
    assert wilson(1.0, count - 1)[0] < threshold


@pytest.mark.parametrize(
    ("tried", "threshold", "said"),
    [
        ([Tried(1.0, 1.0, 24)], 0.9, "too few requests for a bound: 24 cannot prove 90%, even all good it takes 35"),
        ([Tried(1.0, 1.0, 24)], 1.0, "too few requests for a bound: 24 cannot prove 100%, even all good no number can"),
        ([Tried(1.0, 0.9, 24), Tried(2.0, 0.1, 999)], 0.9, "too few requests for a bound: 24"),
        ([Tried(1.0, 0.91, 50)], 0.9, ""),
        ([Tried(1.0, 1.0, 35)], 0.9, ""),
        ([Tried(1.0, 0.5, 5)], 0.9, ""),
        ([Tried(1.0, 1.0)], 0.9, ""),
    ],
)
def test_too_few_requests_for_a_bound_are_said(tried: list[Tried], threshold: float, said: str) -> None:
    """Only where no rate up to the value could have proved it; not where a number is not known."""
    told = unproven(goodput_of(tried, threshold, ""))
    assert told.startswith(said)
    assert bool(told) == bool(said)


def test_wilsons_interval() -> None:
    """81 of 263: 0.2553 to 0.3662 (Newcombe, Stat. Med. 17, 1998, table I, method 3)."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.5, 0) == (0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.1, 99), st.floats(0, 1)), min_size=1), st.integers(1, 1000), st.floats(0.01, 1))
def test_the_interval_contains_the_value(pairs: list[tuple[float, float]], count: int, threshold: float) -> None:
    """Whatever was measured: low <= value < high."""
    found = goodput_of([Tried(*pair, count) for pair in pairs], threshold, "")
    assert found.low <= found.value < (found.high or 100.0)


@pytest.mark.parametrize(
    ("low", "high", "threshold", "tolerance"),
    [(0.0, 1.0, 0.9, 0.1), (2.0, 1.0, 0.9, 0.1), (1.0, 2.0, 0.0, 0.1), (1.0, 2.0, 1.1, 0.1), (1.0, 2.0, 0.9, 0.0)],
)
def test_a_search_that_cannot_be_is_refused(low: float, high: float, threshold: float, tolerance: float) -> None:
    """Rates that are not positive and ascending, shares that are none."""
    with pytest.raises(ConfigError):
        Search(low, high, threshold, tolerance)
