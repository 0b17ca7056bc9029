"""Which objectives a request missed."""

import math
import random
from typing import Any

import numpy as np
import pytest

from pdserve.bench.slo import Slo, itl_figure, percentile
from pdserve.rpc.errors import ConfigError


def test_percentiles_are_numpys_to_the_last_bit() -> None:
    """For lists of 1 to 120 values and usual percentiles; seed 4."""
    rng = random.Random(4)
    for count in range(1, 121):
        values = [rng.expovariate(10) for _ in range(count)]
        for q in (0, 50, 90, 99, 100):
            assert percentile(values, q) == np.percentile(values, q), (count, q)


def test_one_long_gap_of_999_is_not_the_p99_but_is_the_longest() -> None:
    """The three figures of one request differ as their names say."""
    gaps = [0.01] * 998 + [1.0]
    assert itl_figure(gaps, "p99") == pytest.approx(0.01)
    assert itl_figure(gaps, "max") == 1.0
    assert itl_figure(gaps, "mean") == pytest.approx((998 * 0.01 + 1.0) / 999)
    assert Slo(itl=0.05).missed(ttft=0.1, itls=gaps) == ()
    assert Slo(itl=0.05, itl_of="max").missed(ttft=0.1, itls=gaps) == ("itl",)


def test_every_missed_objective_is_named_in_order() -> None:
    """All four, and those alone that were asked for."""
    seen: dict[str, Any] = {"ttft": 2.0, "itls": [0.2, 0.2], "tpot": 0.2, "e2e": 2.4}
    assert Slo(1.0, 0.1, "p99", 0.1, 1.0).missed(**seen) == ("ttft", "itl", "tpot", "e2e")
    assert Slo(tpot=0.1).missed(**seen) == ("tpot",)
    assert Slo().missed(**seen) == ()
    assert Slo().empty


def test_an_objective_is_met_by_a_value_that_equals_it() -> None:
    """As in `vllm bench serve`: at most, not below."""
    assert Slo(ttft=1.0, itl=0.1).missed(ttft=1.0, itls=[0.1]) == ()


def test_an_answer_of_one_token_has_no_gap_to_miss() -> None:
    """Neither ITL nor TPOT can be missed without a second token."""
    assert Slo(itl=0.001, tpot=0.001).missed(ttft=9.0) == ()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_objective_that_is_no_time_is_refused(value: float) -> None:
    """Zero, negative, endless or no number."""
    with pytest.raises(ConfigError, match="ITL"):
        Slo(itl=value)


def test_an_unknown_figure_is_refused() -> None:
    """By name."""
    with pytest.raises(ConfigError, match="p95"):
        Slo(itl=1.0, itl_of="p95")  # type: ignore[arg-type]
