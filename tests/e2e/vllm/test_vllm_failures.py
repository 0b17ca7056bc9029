"""What goes wrong between two vLLM engines is a typed error, or a recompute with the same tokens,
and leaves no block behind: the `pair` fixture checks after each test that every block is free."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.port import Consume, Produce
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import FIRST, GREEDY, Pair, Prompt, ask
from pdserve.engine.vllm.testing_pool import EngineKind, EnginePool
from pdserve.kvd.client import Outcome
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import (
    PdserveError,
    ProducerFailed,
    StaleEpoch,
    TicketExpired,
    TicketForged,
    TransferUsed,
)
from tests.e2e.vllm import kinds

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),  # the first test starts the engines
]

Prompts = Callable[[int], Prompt]


async def refused_source(pair: Pair, tokens: Prompt, kind: str) -> tuple[Consume, Produce | None]:
    """A READ source that kvd refuses, and the transfer that it leaves open (or None)."""
    produce = pair.produce(Mode.READ)
    offered = (await ask(pair.prefill, tokens, FIRST, produce)).last
    consume = pair.consume(produce, offered)
    if kind == "forged":
        ticket = bytearray(consume.ticket)
        ticket[-1] ^= 1
        return replace(consume, ticket=bytes(ticket)), produce
    if kind == "expired":
        return replace(consume, ticket=pair.ticket(produce.transfer_id, offered, expires_in=-1.0)), produce
    if kind == "stale":
        return replace(consume, ticket=pair.stale_ticket(produce.transfer_id, offered)), produce
    await ask(pair.decode, tokens, FIRST, consume)  # used
    return consume, None


REFUSALS: dict[str, type[PdserveError]] = {
    "forged": TicketForged,
    "expired": TicketExpired,
    "stale": StaleEpoch,
    "used": TransferUsed,
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_refused_source_is_kvds_error(kind: str, pair: Pair, prompt: Prompts) -> None:
    """Without leave to recompute, the request fails with kvd's reason and no token; the prompt is
    not computed here."""
    tokens = prompt(100)
    consume, open_transfer = await refused_source(pair, tokens, kind)
    with pytest.raises(REFUSALS[kind]):
        await ask(pair.decode, tokens, GREEDY, consume)
    computed = (await ask(pair.decode, tokens, FIRST)).last
    assert computed.cached_tokens == (96 if kind == "used" else 0)
    if open_transfer is not None:
        pair.cancel(open_transfer.transfer_id)


@pytest.mark.parametrize("kind", REFUSALS)
async def test_with_leave_to_recompute_the_tokens_are_the_same(
    kind: str, pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """The prompt is computed at decode; usage says how much of it."""
    tokens = prompt(100)
    consume, open_transfer = await refused_source(pair, tokens, kind)
    answer = await ask(pair.decode, tokens, GREEDY, replace(consume, recompute=True))
    assert answer.tokens == (await ask(solo, tokens)).tokens
    assert answer.last.recomputed_tokens == 100 - answer.last.cached_tokens
    assert answer.last.cached_tokens == (96 if kind == "used" else 0)
    if open_transfer is not None:
        pair.cancel(open_transfer.transfer_id)


async def test_a_consumer_alone_hears_when_its_producer_gives_up(pair: Pair, prompt: Prompts) -> None:
    """WRITE: decode waits with its blocks reserved; the producer's cancel ends the wait at once."""
    tokens, produce = prompt(100), pair.produce(Mode.WRITE)
    consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
    await pair.reserved(produce.transfer_id)
    assert (await pair.decode.load()).waiting == 1
    pair.cancel(produce.transfer_id, ProducerFailed.reason)
    with pytest.raises(ProducerFailed):
        await consuming
    assert (await pair.end(pair.decode, produce.transfer_id, 0)).outcome is not Outcome.LANDED


async def test_a_consumer_aborted_while_it_waits_returns_its_blocks(pair: Pair, prompt: Prompts) -> None:
    """vLLM frees such blocks only when the worker reports the request: the connector must."""
    tokens, produce = prompt(100), pair.produce(Mode.WRITE)
    consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
    await pair.reserved(produce.transfer_id)
    await cancelled(consuming)
    assert (await pair.end(pair.decode, produce.transfer_id, 0)).outcome is not Outcome.LANDED


async def test_a_held_prompt_is_let_go_when_it_is_given_up(pair: Pair, prompt: Prompts) -> None:
    """READ: the blocks of a finished prefill are held until its transfer is cancelled."""
    produce = pair.produce(Mode.READ)
    await ask(pair.prefill, prompt(100), FIRST, produce)
    load = await pair.prefill.load()
    assert load.free_kv_tokens == load.total_kv_tokens - 4 * 32
    pair.cancel(produce.transfer_id)
    assert (await pair.end(pair.prefill, produce.transfer_id)).outcome is Outcome.CANCELLED


@pytest.mark.parametrize("delay_ms", [0, 3, 8, 15, 25, 40])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_aborts_at_any_moment_leave_nothing(
    leg: str, delay_ms: int, pair: Pair, solo: EngineProcess, prompt: Prompts
) -> None:
    """WRITE: whichever leg goes away, and whenever, the other ends with a typed error or with the
    right tokens. The moments sweep over queueing, chunks, copying and decoding."""
    tokens, produce = prompt(300), pair.produce(Mode.WRITE)
    legs = {
        "prefill": asyncio.create_task(ask(pair.prefill, tokens, FIRST, produce)),
        "decode": asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce))),
    }
    await asyncio.sleep(delay_ms / 1000)
    await cancelled(legs.pop(leg))
    pair.cancel(produce.transfer_id)  # as the service of that leg does
    (other,) = legs.values()
    with contextlib.suppress(PdserveError):
        answer = await other
        assert answer.tokens == (await ask(solo, tokens)).tokens[: len(answer.tokens)]


async def test_one_part_of_a_transfer_is_taken_once(pair: Pair, prompt: Prompts) -> None:
    """Two requests of one engine for the same consumer's part: the second is refused at once."""
    tokens, produce = prompt(100), pair.produce(Mode.WRITE)
    first = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
    await pair.reserved(produce.transfer_id)
    with pytest.raises(TransferUsed):
        await ask(pair.decode, tokens, GREEDY, pair.consume(produce))
    await cancelled(first)


async def test_a_preempted_producer_starts_again(
    pool: EnginePool, llama: Path, solo: EngineProcess, prompt: Prompts
) -> None:
    """WRITE: a producer that loses its blocks between chunks is fenced, computed again and handed
    over whole; a growing local request takes its last block."""
    args = ("--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "8")
    tight = EngineKind(llama, (*args, "--num-gpu-blocks-override", "10", kinds.NO_CACHE))
    async with pool.pair(tight, kinds.usual(llama, 1)) as pair:
        tokens, produce = prompt(220), pair.produce(Mode.WRITE)
        consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
        await pair.reserved(produce.transfer_id)
        # Both at once, the local one first. It has 2 of the 9 blocks while the other one, which needs 7, is taken; and
        # a third at its 65th token, 25 steps later, when the other one has had no more than 7 tokens a step.
        growing = asyncio.create_task(ask(pair.prefill, prompt(40), replace(GREEDY, max_tokens=100)))
        producing = asyncio.create_task(ask(pair.prefill, tokens, FIRST, produce))
        produced = await producing
        assert (await consuming).tokens == (await ask(solo, tokens)).tokens
        await growing
        landed = await pair.end(pair.decode, produce.transfer_id, 0)
        assert landed.outcome is Outcome.LANDED
        assert produced.last.offered_tokens == 220
        # Bytes of the attempt that was taken back do not count.
        assert landed.facts.kv_bytes == 7 * 3 * 2 * 32 * 64 * 4
        assert await pair.prefill.metric("vllm:num_preemptions_total") >= 1


async def test_a_dead_producer_is_told_to_its_consumer(pool: EnginePool, llama: Path, prompt: Prompts) -> None:
    """SIGKILL of prefill's core: decode's request ends with a typed error, its blocks come back, the
    dead engine says so, and decode serves on."""
    async with pool.pair_with_doomed(kinds.usual(llama, 0), kinds.usual(llama, 1)) as pair:
        tokens, produce = prompt(100), pair.produce(Mode.WRITE)
        consuming = asyncio.create_task(ask(pair.decode, tokens, GREEDY, pair.consume(produce)))
        await pair.reserved(produce.transfer_id)
        failed = asyncio.create_task(pair.prefill.failed())
        os.kill(pair.prefill.core_pid, 9)
        async with asyncio.timeout(15):
            assert "died" in await failed
            with pytest.raises(PdserveError):
                await consuming
        assert len((await ask(pair.decode, tokens)).tokens) == 8


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancels a leg as a service does when its client goes away."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, PdserveError):
        await task
