"""Deployments whose prefill and decode engines differ in ranks, blocks and order: on one node, and over two."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdserve.engine.sim import SimConfig
from pdserve.engine.sim.config import KvOrder
from pdserve.kvd.config import KvdConfig, NixlConfig
from pdserve.kvd.testing import running_node
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.make import MakeTransports
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.port import Transport
from pdserve.proxy.types import OnFailure
from tests.sim.deployment import LONG, STEADY
from tests.sim.fleet import Fleet, Prompt

FOUR_HEADS = SimConfig(layers=3, kv_heads=4, block_bytes=16 * 4 * 16, token_budget=64)

LATENT: dict[str, Any] = {"kv_heads": 1, "block_bytes": 16 * 3 * 8}
"""As in MLA: one part a token, which each rank holds whole."""

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks 2 to 1": ({"ranks": 2, "block_bytes": 512}, {}),
    "ranks 1 to 2": ({}, {"ranks": 2, "block_bytes": 512}),
    "blocks 16 to 32": ({}, {"block_size": 32, "block_bytes": 2048}),
    "blocks 32 to 16": ({"block_size": 32, "block_bytes": 2048}, {}),
    "pools of 96 and 160 blocks": ({"num_blocks": 96}, {"num_blocks": 160}),
    "a latent, ranks 2 to 1": (LATENT | {"ranks": 2, "num_blocks": 96}, LATENT),
    "a latent, ranks 1 to 2, blocks 32 to 16": (
        LATENT | {"block_size": 32, "block_bytes": 768},
        LATENT | {"ranks": 2, "num_blocks": 160},
    ),
    "ranks 4 that hold 2 heads twice to 1": (
        {"kv_heads": 2, "ranks": 4, "block_bytes": 256},
        {"kv_heads": 2, "block_bytes": 512, "num_blocks": 160},
    ),
    "everything": (
        {"ranks": 4, "block_bytes": 256, "kv_order": KvOrder.HEADS, "num_blocks": 160},
        {"ranks": 2, "block_size": 48, "block_bytes": 1536, "kv_order": KvOrder.APART, "num_blocks": 64},
    ),
}
OVER_NIXL = [name for name in SHAPES if name.startswith(("ranks 2", "pools", "a latent", "everything"))]


@contextlib.asynccontextmanager
async def two_nodes(
    prefill: dict[str, Any], decode: dict[str, Any], transports: MakeTransports | None = None
) -> AsyncIterator[Fleet]:
    """Prefill beside one daemon, decode beside another."""
    stack = AsyncExitStack()
    fleet = Fleet(stack, FOUR_HEADS, STEADY)
    a = await stack.enter_async_context(running_node(limits=LONG, transports=transports))
    b = await stack.enter_async_context(running_node(limits=LONG, transports=transports))
    try:
        fleet.kvd = a.kvd
        await fleet.start_proxy({"on_failure": OnFailure.FAIL}, None)
        await fleet.host("prefill", **prefill)
        fleet.kvd = b.kvd
        await fleet.host("decode", **decode)
        fleet.kvd = a.kvd
        await fleet.start_clients()
        yield fleet
        await fleet.until(lambda: a.free and b.free)
    finally:
        await fleet.close()


def nixl(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
    """The real library, over TCP, as between two hosts."""
    return (NixlTransport(arena, NixlConfig(tls="tcp")),)


@contextlib.asynccontextmanager
async def one_node(prefill: dict[str, Any], decode: dict[str, Any]) -> AsyncIterator[Fleet]:
    """Both beside one daemon."""
    stack = AsyncExitStack()
    fleet = Fleet(stack, FOUR_HEADS, STEADY)
    node = await stack.enter_async_context(running_node(limits=LONG))
    try:
        fleet.kvd = node.kvd
        await fleet.start_proxy({"on_failure": OnFailure.FAIL}, None)
        await fleet.host("prefill", **prefill)
        await fleet.host("decode", **decode)
        await fleet.start_clients()
        yield fleet
        await fleet.until(lambda: node.free)
    finally:
        await fleet.close()


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("nodes", [one_node, two_nodes], ids=["one node", "two nodes"])
@pytest.mark.parametrize("shapes", list(SHAPES.values()), ids=list(SHAPES))
async def test_answers_are_those_of_one_engine(
    shapes: tuple[dict[str, Any], dict[str, Any]], nodes: Any, mode: str, prompt: Prompt
) -> None:
    """The proxy pairs them, and ten prompts at once, of one token to a dozen blocks, are answered as by an engine
    that computes all by itself; every byte is checked on the way."""
    async with nodes(*shapes) as fleet:
        prompts = [prompt(1 + 21 * n) for n in range(10)]
        answers = await asyncio.gather(*(fleet.ask(tokens, mode=mode) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await fleet.alone(tokens)
            assert answer.kv_bytes


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("shapes", [SHAPES[name] for name in OVER_NIXL], ids=OVER_NIXL)
async def test_the_bytes_cross_the_network(
    shapes: tuple[dict[str, Any], dict[str, Any]], mode: str, prompt: Prompt
) -> None:
    """The same with nixl's own processes between two daemons: short runs are read in one list."""
    async with two_nodes(*shapes, transports=nixl) as fleet:
        prompts = [prompt(1 + 60 * n) for n in range(4)]
        answers = await asyncio.gather(*(fleet.ask(tokens, mode=mode) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == await fleet.alone(tokens)
            assert (answer.transport, bool(answer.kv_bytes)) == ("nixl", True)
