"""Percentiles are exact, by bucket and in all."""

import random
import statistics

import numpy as np
import pytest

from pdserve.traces.percentiles import Timing, percentile, table


def test_percentiles_are_numpys() -> None:
    """Linear between two values, as numpy and spreadsheets do it, for any number of values."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for count in (1, 2, 3, 10, 1001):
        values = sorted(dice.random() for _ in range(count))
        for rank in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, rank) == pytest.approx(float(np.quantile(values, rank)), rel=1e-12)
        assert percentile(values, 0.5) == pytest.approx(statistics.median(values))


def test_requests_fall_into_buckets_of_time() -> None:
    """By their start, oldest bucket first; an empty one is left out; the total is over all of them."""
    minute = 60_000_000
    timings = [
        Timing(2.0 * minute + 1, 0.3, {"egress": 0.1}, 0.0),
        Timing(0.5 * minute, 0.1, {"egress": 0.02}, 0.0),
        Timing(0.0, 0.2, {"egress": 0.04}, 0.01),
    ]
    made = table(timings, minute)
    assert [(b["start_us"], b["count"]) for b in made["buckets"]] == [(0, 2), (2 * minute, 1)]
    assert made["buckets"][0]["p50"] == pytest.approx({"egress": 0.03, "ttft": 0.15, "unattributed": 0.005})
    assert made["total"]["count"] == 3
    assert made["total"]["p50"]["ttft"] == 0.2
    assert made["total"]["p99"]["ttft"] == pytest.approx(0.298)


def test_a_part_counts_over_those_that_passed_it() -> None:
    """A request without a hand-over does not pull kv.wait down to zero; parts come in the order of passing."""
    made = table([Timing(0, 1.0, {"kv.wait": 0.4, "tokenize": 0.1, "new": 0.1}, None), Timing(0, 1.0, {}, None)], 1)
    assert made["total"]["p50"]["kv.wait"] == 0.4
    assert made["parts"] == ["tokenize", "kv.wait", "new"]


def test_nothing_has_no_percentiles() -> None:
    """Rather than zeros, which would be claims."""
    empty = {"count": 0, "p50": {}, "p90": {}, "p99": {}}
    assert table([], 1) == {"parts": [], "buckets": [], "total": empty}
