"""A whole deployment over two nodes: prefill beside one daemon, decode beside another, and the proxy that knows of
neither. Every byte is checked by the engines; nothing may be held on either node at the end of a test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from pdserve.engine.sim import SimConfig
from pdserve.kvd.testing import RunningNode, running_node
from pdserve.proxy.types import OnFailure
from pdserve.rpc.errors import KvdUnavailable, PeerLost
from tests.sim.deployment import LONG, STEADY
from tests.sim.fleet import Fleet, Prompt

GRACE_S = 0.5


class TwoNodes:
    """`fleet` has its prefill engine on node `a` and its decode engine on node `b`."""

    def __init__(self, fleet: Fleet, a: RunningNode, b: RunningNode) -> None:
        self.fleet = fleet
        self.a = a
        self.b = b

    def cut(self) -> None:
        """Breaks the link, both ways."""
        self.a.wire.cut()
        self.b.wire.cut()

    def mend(self) -> None:
        """The link is whole again."""
        self.a.wire.mend()
        self.b.wire.mend()


@contextlib.asynccontextmanager
async def running(grace: float = GRACE_S) -> AsyncIterator[TwoNodes]:
    """Started, and checked at the end."""
    stack = AsyncExitStack()
    fleet = Fleet(stack, SimConfig(token_budget=64), STEADY)
    a = await stack.enter_async_context(running_node(limits=LONG, grace=grace))
    b = await stack.enter_async_context(running_node(limits=LONG, grace=grace))
    try:
        fleet.kvd = a.kvd
        await fleet.start_proxy({"on_failure": OnFailure.FAIL}, None)
        await fleet.host("prefill")
        fleet.kvd = b.kvd
        await fleet.host("decode")
        fleet.kvd = a.kvd
        await fleet.start_clients()
        yield TwoNodes(fleet, a, b)
        a.copies.open()
        b.copies.open()
        await fleet.until(lambda: a.free and b.free)
    finally:
        await fleet.close()


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_answers_are_those_of_one_engine(mode: str, prompt: Prompt) -> None:
    """Twenty requests at once, of one block to thirty: the text is that of an engine that computes all by itself."""
    async with running() as two:
        prompts = [prompt(20 + 25 * n) for n in range(20)]
        answers = await asyncio.gather(*(two.fleet.ask(tokens, mode=mode) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await two.fleet.alone(tokens)
            assert answer.kv_bytes
        assert len(two.a.kvd.node.desk.links) == len(two.b.kvd.node.desk.links) == 1


async def test_a_prefix_that_decode_has_is_not_moved_again(prompt: Prompt) -> None:
    """The second request of a conversation moves its new blocks only."""
    async with running() as two:
        tokens = prompt(320)
        first = await two.fleet.ask(tokens, mode="read")
        second = await two.fleet.ask((*tokens, *prompt(64)), mode="read")
        assert 0 < second.kv_bytes < first.kv_bytes


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_a_client_that_goes_away_under_a_copy_leaves_nothing(mode: str, prompt: Prompt) -> None:
    """The cancel travels to the other node; blocks of both engines come back once the copy has ended."""
    async with running() as two:
        two.b.copies.shut()
        asking = asyncio.create_task(two.fleet.ask(prompt(200), mode=mode))
        await two.b.copies.reached()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        two.b.copies.open()
        await two.fleet.until(lambda: two.a.free and two.b.free)
        tokens = prompt(100)
        assert (await two.fleet.ask(tokens, mode=mode)).token_ids == await two.fleet.alone(tokens)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("node", ["a", "b"])
async def test_a_kvd_that_drains_on_either_node(node: str, mode: str, prompt: Prompt) -> None:
    """Prefill's or decode's, and the proxy has not heard: decode computes the prompt, or the request ends with a word
    of the drain, and after --undo the next one is handed over."""
    async with running() as two:
        kvd = (two.a if node == "a" else two.b).kvd.node
        tokens = prompt(100)
        await kvd.drained(0.0)
        answer = await two.fleet.ask(tokens, mode=mode, on_failure="recompute")
        assert (answer.token_ids, answer.recomputed_tokens) == (await two.fleet.alone(tokens), 100)
        with pytest.raises(KvdUnavailable, match="drains"):
            await two.fleet.ask(prompt(100), mode=mode)
        kvd.undrain()
        assert (await two.fleet.ask(prompt(100), mode=mode)).kv_bytes > 0


async def test_a_link_that_breaks_for_a_moment_is_not_noticed(prompt: Prompt) -> None:
    """Requests under way go on over the next stream."""
    async with running(grace=10.0) as two:
        tokens = [prompt(150) for _ in range(6)]
        two.b.copies.shut()
        asking = [asyncio.create_task(two.fleet.ask(t, mode="read")) for t in tokens]
        await two.b.copies.reached()
        two.cut()
        two.mend()
        two.b.copies.open()
        for answer, t in zip(await asyncio.gather(*asking), tokens, strict=True):
            assert answer.token_ids == await two.fleet.alone(t)
        (link,) = two.b.kvd.node.desk.links
        assert link.resumed


async def test_a_link_that_is_gone_fails_requests_and_the_next_one_succeeds(prompt: Prompt) -> None:
    """The request under way ends with PEER_LOST; after the link is back the next is answered."""
    async with running() as two:
        two.b.copies.shut()
        asking = asyncio.create_task(two.fleet.ask(prompt(150), mode="read"))
        await two.b.copies.reached()
        two.cut()
        with pytest.raises(PeerLost):
            await asking
        two.b.copies.open()
        two.mend()
        tokens = prompt(90)
        assert (await two.fleet.ask(tokens, mode="read")).token_ids == await two.fleet.alone(tokens)
