"""When requests are sent."""

import ast
import asyncio
import importlib.util
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.bench.workload import arrivals
from pdserve.rpc.errors import ConfigError


def vllms_own(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Send times of the installed vLLM's `get_request`, read out of its file: importing vLLM takes half a minute."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "this test reads the installed vLLM: make setup"  # noqa: PT018
    file = Path(spec.origin).parent / "benchmarks" / "serve.py"
    wanted = ("get_request", "_get_current_request_rate")
    nodes = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") in wanted]
    module = ast.Module([*ast.parse("from __future__ import annotations").body, *nodes], [])
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = types.SimpleNamespace(time=lambda: 0.0)  # no time passes, so each sleep is a send time
    names: dict[str, Any] = {
        "asyncio": types.SimpleNamespace(sleep=sleep), "time": clock, "np": np, "Iterable": list,
    }  # fmt: skip
    exec(compile(module, str(file), "exec"), names)  # vLLM's own source
    np.random.seed(seed)  # as `vllm bench serve` does

    async def all_of_them() -> None:
        requests = [object()] * count
        async for _ in names["get_request"](requests, rate, burstiness):
            pass

    asyncio.run(all_of_them())
    return slept


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(("rate", "burstiness"), [(8.0, 1.0), (0.5, 0.25), (3.0, 4.0), (2.0, math.inf)])
def test_send_times_are_those_of_vllm_bench_serve(rate: float, burstiness: float, seed: int) -> None:
    """For a seed, a rate and a burstiness every send time is vLLM's, to the last bit."""
    assert arrivals.like_vllm(rate, burstiness, 100, seed) == vllms_own(rate, burstiness, 100, seed)


def test_send_times_that_vllm_made() -> None:
    """The same without vLLM at hand: rate 8, seed 0, five requests, from get_request of vLLM 0.32.0."""
    expected = [0.1153233250077243, 0.2973094422650755, 0.43108576228310025, 0.5451523059454515, 0.625]
    assert arrivals.like_vllm(8, 1.0, 5, 0) == pytest.approx(expected, rel=1e-12)


def test_the_last_request_goes_out_after_count_over_rate() -> None:
    """The times are stretched, so that the offered rate is exactly the one asked for."""
    assert arrivals.like_vllm(8.0, 1.0, 100, 3)[-1] == pytest.approx(12.5)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_mean_and_the_variation_asked_for(burstiness: float, variation: float) -> None:
    """Mean 1 / rate, coefficient of variation 1 / sqrt(burstiness); 20,000 gaps, seed 5."""
    gaps = np.diff(arrivals.gamma(4.0, burstiness, 20_001, np.random.default_rng(5)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_drawn_times_begin_at_zero_ascend_and_follow_the_generator() -> None:
    """One generator, one list; another, another."""
    one, same, other = (arrivals.gamma(2.0, 1.0, 50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one[0] == 0.0
    assert one == sorted(one) == same != other


def test_a_traces_pattern_is_kept_at_another_rate() -> None:
    """Gaps keep their proportions; the mean rate is the one asked for."""
    assert arrivals.scaled([10.0, 11.0, 14.0], 4.0) == pytest.approx([0.0, 0.125, 0.5])
    with pytest.raises(ConfigError, match="same time"):
        arrivals.scaled([1.0, 1.0], 4.0)


@pytest.mark.parametrize(
    ("rate", "burstiness", "count", "words"),
    [
        (0.0, 1.0, 5, "rate of 0"),
        (-1.0, 1.0, 5, "rate of -1"),
        (math.inf, 1.0, 5, "rate of inf"),
        (math.nan, 1.0, 5, "rate of nan"),
        (1.0, 0.0, 5, "burstiness of 0"),
        (1.0, 1.0, 0, "at least one"),
    ],
)
def test_what_cannot_be_is_refused(rate: float, burstiness: float, count: int, words: str) -> None:
    """A rate of zero and the like end in a sentence that says so."""
    with pytest.raises(ConfigError, match=words):
        arrivals.like_vllm(rate, burstiness, count, 0)
    with pytest.raises(ConfigError, match=words):
        arrivals.gamma(rate, burstiness, count, np.random.default_rng(0))
