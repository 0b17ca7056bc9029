"""Attainment, good rate, goodput, and the search for it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.goodput import Search, attainment, good_rate, goodput_of, wilson
from pdserve.bench.results import Goodput, Tried
from pdserve.rpc.errors import ConfigError


def search(steps: Search, curve: Callable[[float], float], count: int = 1000) -> Goodput:
    """What a search finds on a curve of attainments."""
    going = steps.steps(count)
    rate = next(going)
    while True:
        try:
            rate = going.send(curve(rate))
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
    tried = [Tried(1.0, 1.0), Tried(2.0, 0.92), Tried(3.0, 0.88), Tried(4.0, 0.4)]
    few, many = goodput_of(tried, 0.9, 25, ""), goodput_of(tried, 0.9, 10_000, "")
    assert (few.low, few.value, few.high) == (0.0, 2.0, 4.0)
    assert (many.low, many.value, many.high) == (2.0, 2.0, 3.0)


def test_wilsons_interval() -> None:
    """81 of 263: 0.2553 to 0.3662 (Newcombe, Stat. Med. 17, 1998, table I, method 3)."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.5, 0) == (0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.1, 99), st.floats(0, 1)), min_size=1), st.integers(1, 1000), st.floats(0.01, 1))
def test_the_interval_contains_the_value(pairs: list[tuple[float, float]], count: int, threshold: float) -> None:
    """Whatever was measured: low <= value < high."""
    found = goodput_of([Tried(*pair) for pair in pairs], threshold, count, "")
    assert found.low <= found.value < (found.high or 100.0)


@pytest.mark.parametrize(
    ("low", "high", "threshold", "tolerance"),
    [(0.0, 1.0, 0.9, 0.1), (2.0, 1.0, 0.9, 0.1), (1.0, 2.0, 0.0, 0.1), (1.0, 2.0, 1.1, 0.1), (1.0, 2.0, 0.9, 0.0)],
)
def test_a_search_that_cannot_be_is_refused(low: float, high: float, threshold: float, tolerance: float) -> None:
    """Rates that are not positive and ascending, shares that are none."""
    with pytest.raises(ConfigError):
        Search(low, high, threshold, tolerance)
