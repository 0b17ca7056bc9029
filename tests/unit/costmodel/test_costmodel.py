"""The time of a step: the published lines, and nothing that cannot be meant."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.costmodel import INSTANT, PUBLISHED, CostModel
from pdserve.rpc.errors import ConfigError

counts = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("prefill", "seqs", "seconds"),
    [
        (0, 0, 0.0),
        (4096, 0, 0.08 + 4096 * 0.04e-3),
        (0, 100, 0.069 + 100 * 0.16e-3),
        (8192, 10, 0.069 + 10 * 0.16e-3 + 0.03 + 8192 * 0.045e-3),
    ],
    ids=["nothing", "prefill", "decode", "colocated"],
)
def test_the_published_lines(prefill: int, seqs: int, seconds: float) -> None:
    """Each kind of step costs what the published figures' fits say."""
    assert PUBLISHED.step_time(prefill, seqs, 0) == pytest.approx(seconds)


@given(prefill=counts, seqs=counts, context=counts)
def test_more_work_never_takes_less_time(prefill: int, seqs: int, context: int) -> None:
    """Within a kind of step, time grows with each count, and is never negative."""
    model = CostModel(decode_per_context_token=1e-6)
    now = model.step_time(prefill, seqs, context)
    assert now >= 0
    if prefill:
        assert model.step_time(prefill + 1, seqs, context) >= now
    if seqs:
        assert model.step_time(prefill, seqs + 1, context + 1) > now


def test_context_counts_where_it_has_a_price() -> None:
    """The context slope applies to decoding steps."""
    model = INSTANT
    assert CostModel(0, 0, 0, 0, 1e-3, 0, 0).step_time(0, 2, 500) == pytest.approx(0.5)
    assert model.step_time(10, 10, 10) == 0.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_prices_are_refused(value: float) -> None:
    """A negative or unbounded price is a configuration error that names the price."""
    with pytest.raises(ConfigError, match="mixed_base"):
        CostModel(mixed_base=value)


def test_counts_below_zero_are_a_defect() -> None:
    """A scheduler that counts below zero hears of it."""
    with pytest.raises(ValueError, match="below 0"):
        PUBLISHED.step_time(-1, 0, 0)


@given(seqs=st.integers(1, 500), context=counts, steps=st.integers(0, 50), slope=st.sampled_from([0.0, 1e-6, 3e-7]))
def test_a_run_of_decode_steps_is_its_steps(seqs: int, context: int, steps: int, slope: float) -> None:
    """Taken together they cost to the last bit what they cost one by one, while the context grows."""
    model = CostModel(decode_per_context_token=slope)
    one_by_one = [model.step_time(0, seqs, context + seqs * i) for i in range(steps)]
    assert model.decode_times(seqs, context, steps) == one_by_one


def test_a_run_of_nothing_is_a_defect() -> None:
    """A run has sequences."""
    with pytest.raises(ValueError, match="has sequences"):
        PUBLISHED.decode_times(0, 0, 1)
