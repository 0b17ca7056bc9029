"""Prefill with vLLM on one node, decode with vLLM on another, started with two commands: real KV over the daemons'
link, by nixl over TCP between daemons that show each other certificates, and what that link may do meanwhile. The
clocks of the second node are 3 s ahead."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.two_nodes.conftest import PEER, A, B, Deployments
from tests.two_nodes.links import connections, lossy, received, slow
from tests.two_nodes.ups import AHEAD, BLOCK_BYTES, LEASE, Ups, drawn, two_ups

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),  # the first test starts the engines
]
MODES = ("read", "write")
SLOW = "8mbit"
"""Three long prompts' KV takes some 1.5 s: long enough to do something to the link meanwhile."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ups(deployments: Deployments) -> AsyncIterator[Ups]:
    """One deployment for all tests, which is whole and idle between them."""
    await deployments.aclose()  # the namespaces have room for one
    async with two_ups() as both:
        yield both


async def moving(since: int, wanted: int) -> None:
    """Waits until so many bytes have come over the link since it had carried `since`."""
    for _ in range(400):
        if received() - since >= wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{received() - since} bytes came, not {wanted}")


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_are_those_of_one_engine(ups: Ups, mode: str) -> None:
    """Prompts of a token, of a block and a token, and of many chunks: the KV crosses the link, all of it, and decode
    goes on as if it had computed it."""
    prompts = drawn(1, 33, 300, name=mode)
    alone = await ups.alone(prompts)
    before = received()
    got = await ups.answers(prompts, mode=mode)
    moved = ups.checked(got, alone)
    assert received() - before > moved
    assert {answer["mode"] for answer in got} == {mode}
    await ups.idle()
    assert len([ends for ends in connections() if any(end.endswith(f":{PEER}") for end in ends)]) == 1


async def test_both_nodes_know_how_far_their_clocks_are_apart(ups: Ups) -> None:
    """Those of the second node really are ahead, with all that the other tests see answered."""
    ahead = [(await ups.describe(node)).peers[0].clock_ahead_seconds for node in (A, B)]
    assert ahead == pytest.approx([AHEAD, -AHEAD], abs=0.2)


async def test_decode_computes_on_what_prefill_holds(ups: Ups) -> None:
    """The negative control: when prefill's memory is overwritten between the offer and the copy, the answer is another
    one. With decode's kvd stopped there is time for that."""
    prompts = drawn(300, name="control")
    alone = await ups.alone(prompts)
    with ups.stopped(B, "kvd"):
        asking = await ups.asking(prompts, mode="read")
        await ups.offered()
        ups.scribble()
    (wrong,) = await asking
    assert wrong["kv_bytes"] == 10 * BLOCK_BYTES
    assert wrong["tokens"] != alone[0]
    ups.checked(await ups.answers(prompts, mode="read"), alone)


async def test_five_percent_loss(ups: Ups) -> None:
    """TCP repairs it, for the daemons' words and for the KV."""
    with lossy():
        await both_modes(ups, "loss")


async def test_a_slow_link(ups: Ups) -> None:
    """2 Mbit/s, for the words and the KV."""
    with slow("2mbit"):
        await both_modes(ups, "slow", 33, 200)


async def both_modes(ups: Ups, name: str, *lengths: int) -> None:
    """Requests of both modes are answered rightly."""
    prompts = drawn(*(lengths or (1, 33, 300)), name=name)
    alone = await ups.alone(prompts)
    for mode in MODES:
        ups.checked(await ups.answers(prompts, mode=mode), alone)
    await ups.idle()


@pytest.mark.parametrize("mode", MODES)
async def test_a_link_down_for_a_moment_costs_time_and_nothing_else(ups: Ups, mode: str) -> None:
    """For less than a lease, in the middle of the copies: every request is answered, over the same link."""
    prompts = drawn(300, 300, 300, name=f"moment {mode}")
    alone, lost = await ups.alone(prompts), (await ups.describe(B)).peers_lost
    with slow(SLOW):
        asking, since = await ups.asking(prompts, mode=mode), received()
        await moving(since, 2 * BLOCK_BYTES)
        with ups.cut():
            await asyncio.sleep(1.0)
            assert not asking.done()
        ups.checked(await asking, alone)
    await ups.idle()
    assert (await ups.describe(B)).peers_lost == lost


@pytest.mark.parametrize("mode", MODES)
async def test_a_link_down_for_longer_than_a_lease_fails_what_was_under_way(ups: Ups, mode: str) -> None:
    """In the middle of the copies: each request ends with a reason, nothing stays held on either node while the link is
    still down, no lease ran out; once it is up, the next request is answered."""
    prompts = drawn(300, 300, 300, name=f"longer {mode}")
    alone, lost = await ups.alone(prompts), (await ups.describe(B)).peers_lost
    with slow(SLOW):
        asking, since = await ups.asking(prompts, mode=mode), received()
        await moving(since, 2 * BLOCK_BYTES)
        with ups.cut():
            down = time.monotonic()
            failed: list[dict[str, Any]] = await asking
            await ups.idle()
            await asyncio.sleep(down + LEASE + 1.0 - time.monotonic())
    assert {answer.get("reason") for answer in failed} == {"PEER_LOST"}, failed
    ups.checked(await ups.answers(prompts[:1], mode=mode), alone[:1])
    ups.checked(await ups.answers(prompts, mode=mode), alone)
    await ups.idle()
    described = [await ups.describe(node) for node in (A, B)]
    assert described[1].peers_lost > lost
    assert not any(one.expiries.get("lease") for one in described)
