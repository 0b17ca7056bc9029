"""Two vLLM engines and kvd give the tokens that one engine gives."""

import asyncio
import math
import mmap
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.engine.port import Finish
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import FIRST, GREEDY, Pair, Prompt, ask
from pdserve.kvd.client import Outcome
from pdserve.kvd.types import Mode

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test starts the engines
]

BLOCK = 32
LAYERS = 3
BLOCK_BYTES = 2 * BLOCK * 64 * 4
"""Of one layer: 2 KV heads, K and V of 32 float32 each a token."""
Prompts = Callable[[int], Prompt]


def blocks(tokens: int) -> int:
    """Blocks of a prompt."""
    return math.ceil(tokens / BLOCK)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 300])
@pytest.mark.parametrize("mode", Mode)
async def test_tokens_are_those_of_one_engine(
    mode: Mode, length: int, pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """Whatever the prompt's length against block (32) and chunk (64), in both modes."""
    tokens = prompt(length)
    alone = await ask(solo, tokens)
    both = await pair.hand_over(mode, tokens)
    assert both.consumed.tokens == alone.tokens
    assert both.produced.tokens == alone.tokens[:1]
    assert both.consumed.last.finish is Finish.LENGTH
    assert both.consumed.last.recomputed_tokens == 0
    offered = (both.produced.last.offered_tokens, both.produced.last.offered_blocks)
    assert offered == (length, blocks(length))
    assert both.released.outcome is Outcome.RELEASED
    assert both.landed.outcome is Outcome.LANDED
    assert both.landed.facts.kv_bytes == blocks(length) * LAYERS * BLOCK_BYTES


async def test_write_moves_chunks_while_the_next_ones_are_computed(
    pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """WRITE: with decode's blocks known, the first bytes of a prompt of five chunks moved before
    prefill's engine began the last chunk, most of them have landed before it is done, and the tokens
    are still right.

    The chunks take some milliseconds each: where kvd had no core for so long, another prompt is looked at, of eight.
    Bytes that wait for the end of a prompt come too late with each.
    """
    for _ in range(8):
        tokens, produce = prompt(300), pair.produce(Mode.WRITE)
        consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
        await pair.reserved(produce.transfer_id)
        produced = (await ask(pair.prefill, tokens, FIRST, produce)).last
        landed = (await pair.end(pair.decode, produce.transfer_id, 0)).facts
        assert (await consuming).tokens == (await ask(solo, tokens)).tokens
        assert 0 < landed.first_post_ns < landed.offered_ns
        early = landed.first_post_ns < produced.times.last_chunk_ns < landed.offered_ns
        if early and landed.overlapped_bytes > landed.kv_bytes / 2:
            return
    pytest.fail(f"no prompt's bytes moved while it was computed; the last one's: {landed}, {produced.times}")


async def test_read_overlaps_nothing(pair: Pair, prompt: Prompts) -> None:
    """READ: nothing moves before the offer; the counter that WRITE is judged by says so."""
    both = await pair.hand_over(Mode.READ, prompt(300))
    assert both.landed.facts.overlapped_bytes == 0


@pytest.mark.parametrize("mode", Mode)
async def test_decodes_own_prefix_is_not_moved(mode: Mode, pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """A prefix in decode's cache shortens the transfer to the rest and is counted as cached."""
    prefix, tail = prompt(100), prompt(70)
    await ask(pair.decode, prefix)
    both = await pair.hand_over(mode, prefix + tail)
    assert both.consumed.tokens == (await ask(solo, prefix + tail)).tokens
    assert both.consumed.last.cached_tokens == 96
    assert both.landed.facts.kv_bytes == (blocks(170) - 3) * LAYERS * BLOCK_BYTES


@pytest.mark.parametrize("mode", Mode)
async def test_prefills_own_prefix_is_moved_too(mode: Mode, pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """Blocks that prefill found in its cache are never saved layer by layer, and arrive all the same."""
    prefix, tail = prompt(100), prompt(70)
    await ask(pair.prefill, prefix)
    both = await pair.hand_over(mode, prefix + tail)
    assert both.produced.last.cached_tokens == 96
    assert both.consumed.tokens == (await ask(solo, prefix + tail)).tokens
    assert both.landed.facts.kv_bytes == blocks(170) * LAYERS * BLOCK_BYTES


@pytest.mark.parametrize("mode", Mode)
async def test_one_prompt_may_have_two_consumers(mode: Mode, pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """n = 2: both consumers get the KV, and the producer is let go when both have it."""
    tokens, produce = prompt(90), pair.produce(mode, 2)
    first = FIRST
    if mode is Mode.READ:
        offered = (await ask(pair.prefill, tokens, first, produce)).last
        consumed = [await ask(pair.decode, tokens, GREEDY, pair.consume(produce, offered, consumer=0))]
        assert not pair.host(pair.prefill).end(produce.transfer_id).done()
        consumed.append(await ask(pair.decode, tokens, GREEDY, pair.consume(produce, offered, consumer=1)))
    else:
        legs = [ask(pair.decode, tokens, GREEDY, pair.consume(produce, consumer=index)) for index in (0, 1)]
        _, *consumed = await asyncio.gather(ask(pair.prefill, tokens, first, produce), *legs)
    alone = await ask(solo, tokens)
    assert [one.tokens for one in consumed] == [alone.tokens, alone.tokens]
    assert (await pair.end(pair.prefill, produce.transfer_id)).outcome is Outcome.RELEASED


async def test_many_transfers_at_once_do_not_mix(pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """Eight prompts of both modes at the same time: each gets its own KV."""
    prompts = [prompt(20 + 29 * index) for index in range(8)]
    alone = [(await ask(solo, tokens)).tokens for tokens in prompts]
    modes = [Mode.READ, Mode.WRITE] * 4
    both = await asyncio.gather(*(pair.hand_over(mode, tokens) for mode, tokens in zip(modes, prompts, strict=True)))
    assert [one.consumed.tokens for one in both] == alone


async def test_log_probabilities_survive_the_hand_over(pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """Decode's log probabilities are those of one engine to rounding, from the first token on."""
    tokens, sampling = prompt(130), replace(GREEDY, logprobs=3)
    both = await pair.hand_over(Mode.READ, tokens, sampling)
    alone = await ask(solo, tokens, sampling)
    ours = [p for output in both.consumed.outputs for p in output.logprobs]
    theirs = [p for output in alone.outputs for p in output.logprobs]
    assert len(ours) == 8
    for our, their in zip(ours, theirs, strict=True):
        assert [c.token_id for c in our.top] == [c.token_id for c in their.top]
        assert our.sampled.logprob == pytest.approx(their.sampled.logprob, abs=1e-3)


async def test_stamps_are_in_order(pair: Pair, prompt: Prompts) -> None:
    """The engines' stamps and kvd's are of one clock: prefill is scheduled before it offers, decode
    after the KV has landed. (vLLM stamps a step's tokens when it hands them out, just after the
    connector has offered.)"""
    both = await pair.hand_over(Mode.READ, prompt(150))
    produced, consumed, facts = both.produced.last.times, both.consumed.last.times, both.landed.facts
    assert 0 < produced.scheduled_ns < facts.offered_ns < facts.accepted_ns < facts.landed_ns
    assert facts.landed_ns < consumed.scheduled_ns < consumed.first_token_ns
    assert produced.scheduled_ns < produced.first_token_ns < facts.accepted_ns


async def test_scribbled_source_blocks_change_the_answer(pair: Pair, solo: EngineProcess, prompt: Prompts) -> None:
    """The negative control: decode really computes on the bytes that kvd took from prefill."""
    tokens, produce = prompt(120), pair.produce(Mode.READ)
    offered = (await ask(pair.prefill, tokens, FIRST, produce)).last
    held = await pair.kvd.leased(produce.transfer_id)
    assert len(held) == blocks(120)
    scribble(pair.prefill, held)
    consumed = await ask(pair.decode, tokens, GREEDY, pair.consume(produce, offered))
    assert consumed.tokens != (await ask(solo, tokens)).tokens


def scribble(engine: EngineProcess, held: list[int]) -> None:
    """Overwrites blocks in an engine's KV memory."""
    with engine.memory().open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        layer_bytes = (engine.info.num_blocks + 1) * BLOCK_BYTES
        for layer in range(LAYERS):
            for block in held:
                start = layer * layer_bytes + block * BLOCK_BYTES
                memory[start : start + BLOCK_BYTES] = bytes([0x3F, 0x11]) * (BLOCK_BYTES // 2)
