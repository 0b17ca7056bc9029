"""Engines that lose their blocks in the middle of a hand-over: right bytes all the same, and nothing is written
to blocks that are another's by then."""

import asyncio
from typing import Any

import pytest

from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt

LAYERS, BLOCK_BYTES = 4, 128  # SimConfig's own
LONG = 16 * 16
"""Tokens of a prompt that is computed in four chunks of four blocks."""
FAST = 1e12


async def pushed(fleet: Fleet, prompt: Prompt, tokens: tuple[int, ...], *, local: int) -> tuple[Any, Any]:
    """A WRITE of `tokens` whose first chunk has landed while its producer stands still, beside a request of the
    prefill engine's own that will answer `local` tokens. The two tasks; the gate of the steps is shut.

    Where the pool has one block more than the prompt, the other request's second block, two chunks later, is the
    one that the prompt's last chunk lacks.
    """
    prefill = fleet.prefills[0]
    prefill.steps.shut()
    beside = asyncio.create_task(fleet.local(prefill, prompt(13), local))
    await prefill.steps.pass_one()
    asked = asyncio.create_task(fleet.ask(tokens, mode="write"))
    await fleet.until(lambda: prefill.engine.load().waiting == 1)
    await prefill.steps.pass_one()
    await prefill.steps.pass_one(LAYERS)
    await prefill.steps.reached()
    await fleet.until(lambda: fleet.landed() >= 3 * LAYERS * BLOCK_BYTES)
    return asked, beside


@pytest.mark.parametrize("cached", [False, True])
async def test_a_producer_is_preempted_between_two_pushed_chunks(launch: Launch, prompt: Prompt, cached: bool) -> None:
    """The engine's own traffic takes the block that the last chunk needs. The prompt begins again, in blocks that
    may be others, and every byte that decode has in the end is the prompt's; nothing is counted twice."""
    fleet = await launch(num_blocks=17, token_budget=64, prefix_cache=cached, decodes=0)
    await fleet.host("decode", num_blocks=64)
    tokens = prompt(LONG)
    asked, beside = await pushed(fleet, prompt, tokens, local=40)
    fleet.prefills[0].steps.open()
    answer = await asked
    assert fleet.prefills[0].engine.preemptions >= 1
    assert answer.token_ids == await fleet.alone(tokens)
    assert (answer.recomputed_tokens, answer.fallbacks) == (0, 0)
    assert answer.kv_bytes == 16 * LAYERS * BLOCK_BYTES
    assert len(await beside) == 40


async def test_a_preempted_producer_waits_for_the_fence(launch: Launch, prompt: Prompt) -> None:
    """A copy from its blocks is under way when they are taken away: no step runs before the copy has ended."""
    fleet = await launch(num_blocks=17, token_budget=64, prefix_cache=False, bandwidth=FAST, decodes=0)
    await fleet.host("decode", num_blocks=64)
    prefill, tokens = fleet.prefills[0], prompt(LONG)
    asked, beside = await pushed(fleet, prompt, tokens, local=40)
    fleet.link.shut()
    await prefill.steps.pass_one()
    await fleet.link.reached()
    prefill.steps.open()
    await fleet.until(lambda: prefill.engine.preemptions == 1)
    steps = prefill.engine.load().steps
    for _ in range(50):
        await asyncio.sleep(0)
    assert prefill.engine.load().steps == steps
    fleet.link.open()
    assert (await asked).token_ids == await fleet.alone(tokens)
    await beside


async def test_a_consumer_is_preempted_after_its_hand_over(launch: Launch, prompt: Prompt) -> None:
    """A transfer is taken once: a consumer that loses its blocks computes its prompt itself, and says so."""
    fleet = await launch(num_blocks=8, prefix_cache=False, proxy={"admission_headroom": 0})
    decode = fleet.decodes[0]
    older, younger = prompt(40), prompt(40)
    decode.steps.shut()
    stream = fleet.stream(older, max_tokens=60)
    first = asyncio.create_task(anext(stream))
    await decode.steps.pass_one()
    token = (await first).token_ids[0]
    asked = asyncio.create_task(fleet.ask(younger, max_tokens=50))
    await fleet.until(lambda: decode.engine.load().waiting == 1)
    await decode.steps.pass_one()
    await fleet.until(lambda: fleet.ended().get("released") == 2)
    decode.steps.open()
    answer = await asked
    assert decode.engine.preemptions == 1
    assert answer.token_ids == await fleet.alone(younger, 50)
    assert (answer.recomputed_tokens, answer.fallbacks) == (40, 0)
    whole = await stream.completion()
    assert whole.token_ids == await fleet.alone(older, 60)
    assert whole.token_ids[0] == token


@pytest.mark.parametrize("side", ["prefill", "client"])
async def test_a_producer_is_aborted_in_the_middle_of_a_push(launch: Launch, prompt: Prompt, side: str) -> None:
    """The producer's engine dies, or the client goes, while a copy is under way: blocks that it writes are nobody
    else's until it has ended, and whoever has them next finds its own bytes there."""
    fleet = await launch(token_budget=64, bandwidth=FAST, prefix_cache=False, num_blocks=32)
    prefill, decode = fleet.prefills[0], fleet.decodes[0]
    asked, beside = await pushed(fleet, prompt, prompt(LONG), local=2)
    fleet.link.shut()
    await prefill.steps.pass_one()
    await fleet.link.reached()
    if side == "client":
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    else:
        await fleet.kill(prefill)
        with pytest.raises(errors.EngineDied):
            await asked
    await fleet.until(lambda: not len(decode.parts.calls))
    assert fleet.copying()
    assert decode.engine.load().free_kv_tokens < decode.engine.load().total_kv_tokens
    fleet.link.open()
    prefill.steps.open()
    await asyncio.gather(beside, return_exceptions=True)
    await fleet.settled()
    if side == "prefill":
        await fleet.host("prefill")
    tokens = prompt(LONG)
    assert (await fleet.ask(tokens, mode="write")).token_ids == await fleet.alone(tokens)
