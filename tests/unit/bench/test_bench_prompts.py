"""Lengths and contents of prompts."""

import numpy as np
import pytest

from pdserve.bench.workload.asks import Ask
from pdserve.bench.workload.lengths import Span, draw, parse_span
from pdserve.bench.workload.prompts import TRACE_BLOCK, Prompts, Sharing, TokenRange
from pdserve.bench.workload.scenarios import SCENARIOS
from pdserve.rpc.errors import ConfigError


def rng(seed: int = 1) -> np.random.Generator:
    """Lengths are drawn from it."""
    return np.random.default_rng(seed)


def cached(prompts: list[list[int]], block: int) -> int:
    """Tokens that a prefix cache of whole blocks finds; the last token of a prompt is never found."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        ends = range(block, len(prompt), block)
        found += block * sum(tuple(prompt[:end]) in seen for end in ends)
        seen.update(tuple(prompt[:end]) for end in ends)
    return found


def test_the_named_scenarios() -> None:
    """Seven, in binary thousands, but for the one whose published curves are of 2000 and 1000."""
    assert list(SCENARIOS) == ["1K/1K", "1K/8K", "8K/1K", "8K/8K", "16K/1K", "16K/4K", "2K/1K"]
    assert SCENARIOS["1K/8K"] == (1024, 8192)
    assert SCENARIOS["2K/1K"] == (2000, 1000)


def test_lengths_are_what_was_asked_for() -> None:
    """Fixed ones are fixed; those of a range fill it from end to end."""
    asks = draw(parse_span("100-109"), parse_span("7"), 500, rng())
    assert {ask.prompt_tokens for ask in asks} == set(range(100, 110))
    assert {ask.output_tokens for ask in asks} == {7}
    assert asks == draw(Span(100, 109), Span(7, 7), 500, rng())


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "10-5", "1-2-3"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    """In words, before anything is drawn."""
    with pytest.raises(ConfigError):
        parse_span(text)


def test_prompts_have_their_length_and_no_run_repeats_another() -> None:
    """All from the given ids; a prompt of another run, index or content seed shares no block with this one."""
    asks = draw(Span(64, 64), Span(1, 1), 3, rng())
    one = Prompts(asks, 5, TokenRange(10, 19))
    made = [one.make(index, run) for run in range(3) for index in range(3)] + [Prompts(asks, 6).make(0, 0)]
    assert all(len(prompt) == 64 for prompt in made)
    assert set(one.make(0, 0)) == set(range(10, 20))
    assert len({tuple(prompt[:16]) for prompt in made}) == len(made)
    assert one.make(1, 1) == Prompts(asks, 5, TokenRange(10, 19)).make(1, 1)
    assert one.fresh(64, 0) not in made


@pytest.mark.parametrize(("rate", "groups"), [(0.25, 1), (0.5, 4), (0.9, 2)])
@pytest.mark.parametrize("prompt", [Span(512, 512), Span(200, 800)])
def test_a_prefix_cache_finds_the_share_that_was_asked_for(rate: float, groups: int, prompt: Span) -> None:
    """Within 2 points, the first request of each group included; 200 requests, block of 16."""
    asks = draw(prompt, Span(1, 1), 200, rng())
    prompts = Prompts(asks, 9, sharing=Sharing(rate, groups))
    made: list[list[int]] = [prompts.make(ask.index, 0) for ask in asks]  # type: ignore[misc]  # of ids
    total = sum(map(len, made))
    assert [len(one) for one in made] == [ask.prompt_tokens for ask in asks]
    assert cached(made, 16) / total == pytest.approx(rate, abs=0.02)


def test_a_hit_rate_out_of_reach_is_refused() -> None:
    """Each group's first request finds nothing, so ten requests in five groups reach at most a half."""
    asks = draw(Span(100, 100), Span(1, 1), 10, rng())
    with pytest.raises(ConfigError, match="cannot reach"):
        Prompts(asks, 0, sharing=Sharing(0.6, 5))
    with pytest.raises(ConfigError, match="made here"):
        Prompts([Ask(0, None, 5, text="a"), Ask(1, None, 5, text="b")], 0, sharing=Sharing(0.1))
    with pytest.raises(ConfigError, match="above 0"):
        Sharing(1.0)


def test_equal_names_of_a_traces_blocks_are_equal_content() -> None:
    """Two prompts that share their first name share 512 tokens and no more; a whole last block may be cut."""
    asks = [Ask(0, 600, 1, blocks=(1, 2)), Ask(1, 1000, 1, blocks=(1, 3))]
    prompts = Prompts(asks, 3)
    one, other = (list(prompts.make(index, 0)) for index in (0, 1))
    assert (len(one), len(other)) == (600, 1000)
    assert one[:TRACE_BLOCK] == other[:TRACE_BLOCK]
    assert one[TRACE_BLOCK:] != other[TRACE_BLOCK:600]


def test_a_data_sets_text_is_sent_as_it_is() -> None:
    """Whatever the run."""
    prompts = Prompts([Ask(0, None, 5, text="Once upon a time")], 0)
    assert prompts.make(0, 0) == prompts.make(0, 7) == "Once upon a time"
