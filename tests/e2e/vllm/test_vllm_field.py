"""Failures that users of other prefill/decode systems reported, that need a real engine: see docs/field-failures.md."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.engine.port import Finish
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import GREEDY, Pair, Prompt, ask
from pdserve.kvd.types import Mode

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test starts the engines
]

Prompts = Callable[[int], Prompt]


@pytest.mark.parametrize("mode", Mode)
async def test_a_prefix_that_is_being_computed_is_moved_too(
    mode: Mode, pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """Four prompts with one beginning at the same time: prefill finds blocks in its cache that the step under way,
    or the one being scheduled, computes. They go over when they are complete: the tokens are those of one engine."""
    prefix = prompt(6 * 32)
    prompts = [prefix + prompt(10 + 17 * index) for index in range(4)]
    alone = [(await ask(solo, tokens)).tokens for tokens in prompts]
    both = await asyncio.gather(*(pair.hand_over(mode, tokens) for tokens in prompts))
    assert [one.consumed.tokens for one in both] == alone
    assert max(one.produced.last.cached_tokens for one in both) > 0, "no prefix was used again"
    await pair.idle()


@pytest.mark.parametrize("mode", Mode)
async def test_blocks_of_an_answer_that_ended_early_take_the_next_kv(
    mode: Mode, pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """Half of the answers end at their first token, and KV of others comes into what is free by that. Nobody's KV is
    written over: the tokens are those of one engine."""
    prompts = [prompt(40 + 11 * index) for index in range(12)]
    alone = [(await ask(solo, tokens)).tokens for tokens in prompts]
    early = [index % 2 == 0 for index in range(12)]
    samplings = [
        replace(GREEDY, stop_token_ids=(tokens[0],)) if stops else GREEDY
        for tokens, stops in zip(alone, early, strict=True)
    ]
    jobs = [pair.hand_over(mode, tokens, sampling) for tokens, sampling in zip(prompts, samplings, strict=True)]
    both = await asyncio.gather(*jobs)
    expected = [tokens[:1] if stops else tokens for tokens, stops in zip(alone, early, strict=True)]
    assert [one.consumed.tokens for one in both] == expected
    assert [one.consumed.last.finish is Finish.STOP for one in both] == early
    await pair.idle()
