"""What may happen to the link of two nodes while prefill with vLLM on one hands over to decode with vLLM on the other:
see test_vllm. The engines' KV lies alike."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.two_nodes.asker import Answer
from tests.two_nodes.conftest import A, B
from tests.two_nodes.links import lossy, received, slow
from tests.two_nodes.ups import BLOCK, LEASE, TOKEN_BYTES, Ups, drawn

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),  # the first test starts the engines
]
MODES = ("read", "write")
SLOW, LONG = "8mbit", (250, 250, 250, 250)
"""The KV of these prompts takes some 1.5 s: long enough to do something to the link meanwhile."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ups(vllm_ups: Ups) -> AsyncIterator[Ups]:
    """One prefill engine."""
    await vllm_ups.parted()
    yield vllm_ups


async def moving(since: int, wanted: int) -> None:
    """Waits until so many bytes have come over the link since it had carried `since`."""
    for _ in range(400):
        if received() - since >= wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{received() - since} bytes came, not {wanted}")


async def test_five_percent_loss(ups: Ups) -> None:
    """TCP repairs it, for the daemons' words and for the KV."""
    with lossy():
        await both_modes(ups, "loss")


async def test_a_slow_link(ups: Ups) -> None:
    """2 Mbit/s, for the words and the KV."""
    with slow("2mbit"):
        await both_modes(ups, "slow", 33, 120)


async def both_modes(ups: Ups, name: str, *lengths: int) -> None:
    """Requests of both modes are answered rightly."""
    prompts = drawn(*(lengths or (1, 33, 300)), name=name)
    alone = await ups.alone(prompts)
    for mode in MODES:
        ups.checked(await ups.answers(prompts, mode=mode), alone)
    await ups.idle()


async def under_way(ups: Ups, prompts: Sequence[Sequence[int]]) -> "asyncio.Task[list[Answer]]":
    """Asks for these prompts, in either mode in turn, and waits until bytes have come and copies of both are begun."""
    since, modes = received(), [MODES[number % 2] for number in range(len(prompts))]
    asking = await ups.call(
        [{"prompt": prompt, "ignore_eos": True, "mode": mode} for prompt, mode in zip(prompts, modes, strict=True)]
    )
    await ups.filling(len(MODES))
    await moving(since, BLOCK * TOKEN_BYTES)
    return asking


async def test_a_link_down_for_a_moment_costs_time_and_nothing_else(ups: Ups) -> None:
    """For less than a lease, in the middle of the copies of both modes: every request is answered, over the same
    link."""
    prompts = drawn(*LONG, name="moment")
    alone, lost = await ups.alone(prompts), (await ups.describe(B)).peers_lost
    with slow(SLOW):
        asking = await under_way(ups, prompts)
        with ups.cut():
            await asyncio.sleep(1.0)
            assert not asking.done()
        ups.checked(await asking, alone)
    await ups.idle()
    assert (await ups.describe(B)).peers_lost == lost


async def test_a_link_down_for_longer_than_a_lease_fails_what_was_under_way(ups: Ups) -> None:
    """In the middle of the copies of both modes: each request ends with a reason, nothing stays held on either node
    while the link is still down, no lease ran out; once it is up, the next request is answered."""
    prompts = drawn(*LONG, name="longer")
    alone, lost = await ups.alone(prompts), (await ups.describe(B)).peers_lost
    with slow(SLOW):
        asking = await under_way(ups, prompts)
        with ups.cut():
            down = time.monotonic()
            failed: list[dict[str, Any]] = await asking
            await ups.idle()
            await asyncio.sleep(down + LEASE + 1.0 - time.monotonic())
    assert {answer.get("reason") for answer in failed} == {"PEER_LOST"}, failed
    ups.checked(await ups.answers(prompts[:1], mode="read"), alone[:1])
    for mode in MODES:
        ups.checked(await ups.answers(prompts, mode=mode), alone)
    await ups.idle()
    described = [await ups.describe(node) for node in (A, B)]
    assert described[1].peers_lost > lost
    assert not any(one.expiries.get("lease") for one in described)
