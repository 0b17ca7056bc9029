"""Prefix caches on either side: what decode has is not sent again, what it shares is never written to, and what the
usage says is prefill's."""

import asyncio

import pytest

from tests.sim.fleet import Fleet, Launch, Prompt

BLOCK, LAYERS, BLOCK_BYTES = 16, 4, 128  # SimConfig's own
PER_BLOCK = LAYERS * BLOCK_BYTES
BOTH = pytest.mark.parametrize("mode", ["read", "write"])


@BOTH
@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 7])
async def test_the_same_prompt_again(fleet: Fleet, prompt: Prompt, mode: str, length: int) -> None:
    """Both caches know all whole blocks but the one of the last token, which is computed: one block goes over."""
    tokens = prompt(length)
    first = await fleet.ask(tokens, mode=mode)
    again = await fleet.ask(tokens, mode=mode)
    assert first.token_ids == again.token_ids == await fleet.alone(tokens)
    known = (length - 1) // BLOCK
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, known * BLOCK)
    assert first.kv_bytes == -(-length // BLOCK) * PER_BLOCK
    assert again.kv_bytes == (-(-length // BLOCK) - known) * PER_BLOCK
    assert again.recomputed_tokens == 0


@BOTH
async def test_a_shared_prefix(fleet: Fleet, prompt: Prompt, mode: str) -> None:
    """Five blocks in common: the other five go over."""
    prefix = prompt(5 * BLOCK)
    for _ in range(2):
        tokens = prefix + prompt(5 * BLOCK)
        answer = await fleet.ask(tokens, mode=mode)
        assert answer.token_ids == await fleet.alone(tokens)
    assert answer.usage.cached_tokens == 5 * BLOCK
    assert answer.kv_bytes == 5 * PER_BLOCK


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_cache_on_one_side_only(launch: Launch, prompt: Prompt, mode: str, side: str) -> None:
    """Prefill's hits are announced and sent like what it computes; decode's are not, and are no cached tokens of the
    usage, which the prompt's price follows."""
    fleet = await launch(prefills=0, decodes=0, token_budget=64)
    await fleet.host("prefill", prefix_cache=side == "prefill")
    await fleet.host("decode", prefix_cache=side == "decode")
    tokens = prompt(10 * BLOCK)
    await fleet.ask(tokens, mode=mode)
    again = await fleet.ask(tokens, mode=mode)
    assert again.token_ids == await fleet.alone(tokens)
    assert again.usage.cached_tokens == (9 * BLOCK if side == "prefill" else 0)
    assert again.kv_bytes == (10 if side == "prefill" else 1) * PER_BLOCK


@BOTH
async def test_shared_blocks_are_never_written(launch: Launch, prompt: Prompt, mode: str) -> None:
    """A running answer and a new request share five blocks at decode. Prefill's copy of them is spoilt before the
    link carries anything of the new request: decode, which checks every byte again at the end, never sees it."""
    fleet = await launch(bandwidth=1e12)
    decode, prefill, prefix = fleet.decodes[0], fleet.prefills[0], prompt(5 * BLOCK)
    stream = fleet.stream(prefix + prompt(20), mode=mode, max_tokens=1000)
    await anext(stream)
    fleet.link.shut()
    tokens = prefix + prompt(40)
    asked = asyncio.create_task(fleet.ask(tokens, mode=mode))
    await fleet.link.reached()
    await fleet.until(lambda: "complete" in fleet.producers())
    (lease,) = [lease for lease in fleet.kvd.node.leases if lease.engine_id == prefill.engine_id]
    prefill.engine.memory().poison(lease.block_ids[:5])
    fleet.link.open()
    answer = await asked
    assert answer.token_ids == await fleet.alone(tokens)
    assert answer.kv_bytes == (-(-len(tokens) // BLOCK) - 5) * PER_BLOCK
    assert len((await stream.completion()).token_ids) == 1000
    await fleet.until(lambda: prefill.engine.corrupt == 1)
    assert decode.engine.corrupt == 0
    fleet.corrupt = 1  # prefill's own, that the test has spoilt


@BOTH
async def test_the_same_prompt_many_times_at_once(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Blocks of one prompt under many leases and many answers: each is given back as often as it was taken."""
    fleet = await launch(prefills=2, decodes=2, token_budget=64, num_blocks=64)
    tokens = prompt(7 * BLOCK + 3)
    answers = await asyncio.gather(*(fleet.ask(tokens, mode=mode, n=1 + i % 3) for i in range(24)))
    expected = await fleet.alone(tokens)
    assert {choice.token_ids for answer in answers for choice in answer.choices} == {expected}
    await fleet.settled(5)
