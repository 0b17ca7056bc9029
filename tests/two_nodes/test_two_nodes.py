"""Prefill on one node and decode on another, and what a network does to the link of their daemons."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.two_nodes.conftest import DEVICE, A, B, Nodes, inside, running

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.timeout(240)]


async def both_modes(nodes: Nodes, seed: int) -> int:
    """Requests of both modes are answered rightly; the bytes of KV that were moved for that."""
    moved = 0
    for mode in ("read", "write"):
        answers = await (await nodes.ask(mode, seed=seed))
        await nodes.right(answers)
        moved += sum(said["kv_bytes"] for said in answers)
    await nodes.idle()
    return moved


async def test_read_and_write_across_nodes() -> None:
    """Both modes, over one link that both daemons show."""
    async with running() as nodes:
        await both_modes(nodes, 1)
        for node in (A, B):
            described = await nodes.describe(node)
            assert [(peer.state, peer.resumed) for peer in described.peers] == [("open", 0)]
            assert not described.peers_lost


async def test_bytes_over_the_link_itself() -> None:
    """nixl over TCP: the KV crosses the daemons' link, and is right."""
    nixl = ("--transport=nixl", "--nixl-tls=tcp", f"--nixl-net-devices={DEVICE}")
    async with running(transport=nixl) as nodes:
        before = received()
        moved = await both_modes(nodes, 1)
        assert received() - before > moved > 0


def received() -> int:
    """Bytes that have come to decode's node over the daemons' link."""
    return int(inside(B, "cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes").stdout)


async def test_a_link_down_for_a_moment_costs_time_and_nothing_else() -> None:
    """Two seconds without a link under load: every request is answered, and the link is the same."""
    async with running() as nodes:
        await both_modes(nodes, 1)
        asking = await nodes.ask("read", count=40, tokens=400, seed=2)
        await asyncio.sleep(0.3)
        nodes.link("down")
        await asyncio.sleep(2.0)
        nodes.link("up")
        await nodes.right(await asking)
        await nodes.idle()
        assert not (await nodes.describe(B)).peers_lost


async def test_a_link_that_stays_down_fails_requests_by_name_and_nothing_stays_held() -> None:
    """Longer than keepalive and grace: what was under way ends with a reason; once it is up, all works."""
    async with running() as nodes:
        await both_modes(nodes, 1)
        nodes.link("down")
        answers = await (await nodes.ask("read", seed=3))
        assert {said.get("reason") for said in answers} == {"PEER_LOST"}, answers
        await nodes.idle()
        assert (await nodes.describe(B)).peers_lost
        nodes.link("up")
        for attempt in range(20):
            answers = await (await nodes.ask("read", count=1, seed=4 + attempt))
            if "tokens" in answers[0]:
                break
            await asyncio.sleep(0.5)
        await both_modes(nodes, 30)


@contextlib.contextmanager
def impaired(*command: str, undo: tuple[str, ...]) -> Iterator[None]:
    """The link of both nodes with a command's effect; skips where the kernel lacks it."""
    for node in (A, B):
        done = inside(node, *command)
        if done.returncode:
            inside(A, *undo)
            pytest.skip(f"{command[0]}: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        for node in (A, B):
            inside(node, *undo)


async def test_five_percent_loss() -> None:
    """TCP repairs it; every request is answered."""
    rule = ("INPUT", "-i", DEVICE, "-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP")
    with impaired("iptables", "-A", *rule, undo=("iptables", "-D", *rule)):
        async with running() as nodes:
            for seed in range(3):
                await both_modes(nodes, 1 + seed)
            assert not (await nodes.describe(B)).peers_lost


async def test_a_slow_link() -> None:
    """256 kbit/s for the words of the daemons: every request is answered."""
    tbf = ("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", "256kbit", "burst", "8kb", "latency", "400ms")
    with impaired(*tbf, undo=("tc", "qdisc", "del", "dev", DEVICE, "root")):
        async with running() as nodes:
            await both_modes(nodes, 1)


async def test_a_link_with_a_delay() -> None:
    """A relay keeps the daemons' words for 200 ms each way: every request is answered."""
    async with running(delay=0.2) as nodes:
        await both_modes(nodes, 1)


async def test_clocks_that_are_three_seconds_apart() -> None:
    """Tickets and locators hold, requests are answered, and both daemons say how far the other's clock is off."""
    async with running(clock_off=3.0) as nodes:
        await both_modes(nodes, 1)
        ahead = {node: (await nodes.describe(node)).peers[0].clock_ahead_seconds for node in (A, B)}
        assert ahead[A] == pytest.approx(3.0, abs=0.2)
        assert ahead[B] == pytest.approx(-3.0, abs=0.2)
