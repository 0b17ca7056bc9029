"""Both ends of one hand-over at the services' own API: left in either order, filled to the last block, referred to
when it is over, and unlike each other. From docs/field-failures.md."""

import asyncio
import os
from typing import Any

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.rpc import errors
from pdserve.rpc.status import to_error
from tests.sim.fleet import Fleet, Launch, Prompt
from tests.sim.services.legs import Legs

BLOCK = 16
TOKENS = 40
FAST = 1e12
BOTH = pytest.mark.parametrize("mode", ["read", "write"])


async def both_legs(fleet: Fleet, legs: Legs, mode: str, tokens: tuple[int, ...]) -> dict[str, Any]:
    """The two calls of one hand-over, as the proxy opens them in its mode."""
    tid, prefill, decode = os.urandom(16), fleet.prefills[0], fleet.decodes[0]
    if mode == "write":
        second = await legs.decode(decode, tid, tokens)
        return {"prefill": await legs.prefill(prefill, tid, tokens, mode), "decode": second}
    first = await legs.prefill(prefill, tid, tokens, mode)
    ticket = (await first.read()).ready.ticket
    return {"prefill": first, "decode": await legs.decode(decode, tid, tokens, ticket=ticket)}


@BOTH
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_both_ends_are_left_while_blocks_move(launch: Launch, prompt: Prompt, mode: str, first: str) -> None:
    """One caller goes away in the middle of a copy, and then the other: no block is free under the copy, and every
    block of both sides is when it has ended."""
    fleet = await launch(bandwidth=FAST)
    fleet.link.shut()
    calls = await both_legs(fleet, Legs(fleet), mode, prompt(TOKENS))
    await fleet.link.reached()
    sides = {"prefill": fleet.prefills[0], "decode": fleet.decodes[0]}
    order = [first, *(side for side in sides if side != first)]
    for side in order:
        calls[side].cancel()
        await fleet.until(lambda side=side: not len(sides[side].parts.calls))  # type: ignore[misc]  # bound per side
    assert fleet.copying()
    for service in sides.values():
        counts = fleet.kvd.node.leases.counts(service.engine_id, 512)
        assert counts.free < 512, f"{service.role}'s blocks are free while the copy runs"
    fleet.link.open()
    await fleet.settled(5)


@BOTH
async def test_kv_that_fills_decodes_pool_to_the_last_block(launch: Launch, prompt: Prompt, mode: str) -> None:
    """Four hand-overs fill decode's pool exactly, and each answer needs one block more than there is: they make room
    for each other, and all end with the right tokens."""
    fleet = await launch(prefills=0, decodes=0, prefix_cache=False, bandwidth=FAST)
    await fleet.host("prefill")
    decode, legs = await fleet.host("decode", num_blocks=8), Legs(fleet)
    prompts = [prompt(2 * BLOCK) for _ in range(4)]
    fleet.link.shut()
    calls = [await both_legs(fleet, legs, mode, tokens) for tokens in prompts]
    await fleet.until(lambda: decode.engine.load().free_kv_tokens == 0)
    assert not fleet.ended(), "one has landed before the pool was full"
    fleet.link.open()
    answers = await asyncio.gather(*(legs.tokens(call["decode"]) for call in calls))
    assert answers == [list(await fleet.alone(tokens, 4)) for tokens in prompts]
    assert decode.engine.preemptions > 0


async def test_a_ticket_whose_blocks_are_anothers_now(launch: Launch, prompt: Prompt) -> None:
    """An offer is given up and its blocks, which are the whole pool, hold the next prompt: the first ticket gets the
    reason of its end and no byte of that prompt, and the second one its answer."""
    fleet = await launch(num_blocks=3)
    prefill, decode, legs = fleet.prefills[0], fleet.decodes[0], Legs(fleet)
    mine, others = prompt(TOKENS), prompt(TOKENS)
    old, new = os.urandom(16), os.urandom(16)
    held = await legs.prefill(prefill, old, mine, "read")
    old_ticket = (await held.read()).ready.ticket
    await fleet.until(lambda: len(list(fleet.kvd.node.leases)) == 1)  # a ticket may be there before kvd has its offer
    (blocks,) = [sorted(lease.block_ids) for lease in fleet.kvd.node.leases]
    held.cancel()
    await fleet.settled(5)
    kept = await legs.prefill(prefill, new, others, "read")
    new_ticket = (await kept.read()).ready.ticket
    await fleet.until(lambda: [sorted(lease.block_ids) for lease in fleet.kvd.node.leases] == [blocks])
    for tid, ticket, kind in (
        (old, old_ticket, errors.RequestCancelled),
        (os.urandom(16), new_ticket, errors.TicketRefused),
    ):
        refused = await legs.decode(decode, tid, mine, ticket=ticket)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await refused.read()
        assert type(to_error(raised.value)) is kind, "and before any token"
    answer = await legs.tokens(await legs.decode(decode, new, others, ticket=new_ticket))
    assert answer == list(await fleet.alone(others, 4))
    await legs.released(kept)


async def test_an_unlike_engine_that_may_recompute_lives_on(fleet: Fleet, legs: Legs, prompt: Prompt) -> None:
    """A ticket of an engine of another identity, with leave to recompute: the request is refused by name, prefill's
    blocks come back at once, and the engine that refused answers the next one."""
    other, tokens, tid = await fleet.host("decode", identity={"kv_dtype": "other"}), prompt(TOKENS), os.urandom(16)
    held = await legs.prefill(fleet.prefills[0], tid, tokens, "read")
    ticket = (await held.read()).ready.ticket
    refused = await legs.decode(other, tid, tokens, ticket=ticket, on_failure=common_pb2.FAILURE_POLICY_RECOMPUTE)
    assert type(await fleet.refusal(refused)) is errors.IncompatibleEngines
    assert isinstance(await fleet.refusal(held), errors.ConsumerFailed)
    await fleet.settled(5)
    said = [token for output in await fleet.local(other, tokens, 4) for token in output.token_ids]
    assert said == list(await fleet.alone(tokens, 4))
    assert not other.task.done()
