"""Prefill on one node and decode on another, and what a network does to the link of their daemons.

Tests of one deployment stand side by side, so that it is started once.
"""

import asyncio
import time

import pytest

from tests.two_nodes.conftest import BACK, NIXL, PEER, SIM, A, B, Deployment, Deployments, Nodes
from tests.two_nodes.links import connections, lossy, received, slow

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

BYTES = Deployment(NIXL)
"""The KV crosses the link, as the daemons' words do."""
AHEAD = 3.0
WORDS = Deployment(clock_off=AHEAD)
"""The daemons' words alone cross it. The second node's clocks are ahead, in seconds."""


async def both_modes(nodes: Nodes, seed: int) -> int:
    """Requests of both modes are answered rightly; the bytes of KV that were moved for that."""
    moved = 0
    for mode in ("read", "write"):
        answers = await (await nodes.ask(mode, seed=seed))
        await nodes.right(answers)
        moved += sum(said["kv_bytes"] for said in answers)
    await nodes.idle()
    return moved


async def over_a_lossy_link(nodes: Nodes) -> None:
    """Every request is answered, and no peer is lost."""
    lost = (await nodes.describe(B)).peers_lost
    with lossy():
        for seed in range(3):
            await both_modes(nodes, 1 + seed)
    assert (await nodes.describe(B)).peers_lost == lost


async def test_bytes_over_the_link_itself(deployments: Deployments) -> None:
    """nixl over TCP: the KV crosses the daemons' link, and is right."""
    async with deployments.running(BYTES) as nodes:
        before = received()
        moved = await both_modes(nodes, 1)
        assert received() - before > moved > 0


async def test_bytes_over_a_link_that_loses_five_percent(deployments: Deployments) -> None:
    """TCP repairs it; every request is answered."""
    async with deployments.running(BYTES) as nodes:
        await over_a_lossy_link(nodes)


async def test_bytes_over_a_slow_link(deployments: Deployments) -> None:
    """256 kbit/s: every request is answered."""
    async with deployments.running(BYTES) as nodes:
        with slow("256kbit"):
            await both_modes(nodes, 1)


async def test_read_and_write_across_nodes(deployments: Deployments) -> None:
    """Both modes, over one link that both daemons show: one connection, to the port of one of them, and no other."""
    async with deployments.running(WORDS) as nodes:
        await both_modes(nodes, 1)
        for node in (A, B):
            described = await nodes.describe(node)
            assert [(peer.state, peer.resumed) for peer in described.peers] == [("open", 0)]
            assert not described.peers_lost
        (ends,) = connections()
        assert {f"{BACK[A]}:{PEER}", f"{BACK[B]}:{PEER}"} & set(ends)


async def test_clocks_that_are_three_seconds_apart(deployments: Deployments) -> None:
    """Tickets and locators hold, requests are answered, and both daemons say how far the other's clock is off."""
    async with deployments.running(WORDS) as nodes:
        await both_modes(nodes, 1)
        ahead = {node: (await nodes.describe(node)).peers[0].clock_ahead_seconds for node in (A, B)}
        assert ahead[A] == pytest.approx(AHEAD, abs=0.2)
        assert ahead[B] == pytest.approx(-AHEAD, abs=0.2)


async def test_a_link_down_for_a_moment_costs_time_and_nothing_else(deployments: Deployments) -> None:
    """Two seconds without a link under load: every request is answered, and the link is the same."""
    async with deployments.running(WORDS) as nodes:
        await both_modes(nodes, 1)
        lost = (await nodes.describe(B)).peers_lost
        asking = await nodes.ask("read", count=40, tokens=400, seed=2)
        await asyncio.sleep(0.05)
        with nodes.cut():
            await asyncio.sleep(2.0)
            assert not asking.done()
        await nodes.right(await asking)
        await nodes.idle()
        assert (await nodes.describe(B)).peers_lost == lost


async def test_words_over_a_link_that_loses_five_percent(deployments: Deployments) -> None:
    """TCP repairs it; every request is answered."""
    async with deployments.running(WORDS) as nodes:
        await over_a_lossy_link(nodes)


async def test_words_over_a_slow_link(deployments: Deployments) -> None:
    """256 kbit/s: every request is answered."""
    async with deployments.running(WORDS) as nodes:
        with slow("256kbit"):
            await both_modes(nodes, 1)


async def test_a_link_that_stays_down_fails_requests_by_name_and_nothing_stays_held(deployments: Deployments) -> None:
    """Longer than keepalive, grace and a lease: what was under way ends with a reason, and what comes meanwhile too;
    no lease ran out for that. Once it is up, all works."""
    lease = 3.0
    told = (*SIM, f"--lease={lease}", "--peer-silence=3", "--grace=1", "--peer-connect=2", "--sim-delay=0.5")
    async with deployments.running(Deployment(told)) as nodes:
        await both_modes(nodes, 1)
        asking = await nodes.ask("read", tokens=400, seed=2)
        await nodes.busy()
        with nodes.cut():
            down = time.monotonic()
            answers = [*await asking, *await (await nodes.ask("read", seed=3))]
            reasons = {said.get("reason") for said in answers if "tokens" not in said}
            assert reasons == {"PEER_LOST"}, answers
            assert all("reason" in said for said in answers[6:]), answers
            await nodes.idle()
            assert time.monotonic() - down > lease
            described = [await nodes.describe(node) for node in (A, B)]
            assert described[1].peers_lost
            assert not any(one.expiries.get("lease") for one in described)
        await nodes.right(await (await nodes.ask("read", count=1, seed=4)))
        await both_modes(nodes, 30)


async def test_a_link_with_a_delay(deployments: Deployments) -> None:
    """A relay keeps the daemons' words for 200 ms each way: every request is answered."""
    async with deployments.running(Deployment(NIXL, delay=0.2)) as nodes:
        await both_modes(nodes, 1)
