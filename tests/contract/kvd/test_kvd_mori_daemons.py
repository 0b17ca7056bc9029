"""Two daemons that hand over through mori, on the fake of its library: daemons, link, processes and bytes are real."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.client import Accept, Cancel, Memory, Offer, Outcome, RegionClient
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.operator import OperatorService
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.testing import FakeEngine, RunningKvd, running_kvd
from pdserve.kvd.testing.engine import plain_layout
from pdserve.kvd.testing.mori import FAKE, Machine, to_env
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library, MoriProcess
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import MemoryKind, Mode
from pdserve.rpc.errors import InvalidRequest
from tests.contract.kvd.far_rig import count
from tests.contract.kvd.mori_ranks import Rank
from tests.contract.kvd.mori_suite import FAST, bound_to
from tests.contract.kvd.peers_rig import new_id, until
from tests.contract.kvd.test_kvd_peers_cards import Lives, Ways

FOREIGN = Machine(foreign=False)
LAYOUT = plain_layout(64)
BYTES = 64 * 2 * 4096


@pytest.fixture
async def two(forked: Library) -> AsyncIterator[Ways]:
    """Two nodes that have handed over before; `b` is the consumer's."""

    def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
        """As `--transport mori` has them."""
        return (ShmTransport(arena), MoriTransport(arena, FAST, forked, to_env()))

    peer = PeerConfig(listen="127.0.0.1:0")
    async with (
        running_kvd(transports=transports, peer=peer) as a,
        running_kvd(transports=transports, peer=peer) as b,
        FakeEngine(a, ranks=2, seed=1) as p,
        FakeEngine(b, ranks=2, seed=2) as d,
    ):
        made = Ways(Lives(), a, b, p, d)
        assert await made.transfer("first") is Outcome.LANDED
        assert made.same
        yield made


def process(node: RunningKvd) -> MoriProcess:
    """The one mori process of a node: a producer's serves, a consumer's reads."""
    _, transport = node.node.transports
    assert isinstance(transport, MoriTransport)
    (found,) = transport.processes()
    return found


async def test_a_node_that_only_serves_or_only_reads_has_one_process_which_sleeps_between(two: Ways) -> None:
    """The next transfer wakes the one that reads, and lands; the one that is read sleeps on."""
    serving, reading = process(two.a), process(two.b)
    await until(lambda: serving.asleep and reading.asleep)
    assert await two.transfer("next") is Outcome.LANDED
    assert two.same
    assert serving.asleep
    assert (process(two.a), process(two.b)) == (serving, reading)


async def test_a_mori_process_that_dies_costs_no_more_than_what_was_read_through_it(two: Ways) -> None:
    """The reading one dies while nothing is read: no transfer does. The serving one dies: one transfer fails, once its
    silence has been noticed, and the next one lands by another card."""
    reading = process(two.b)
    os.kill(reading.pid, signal.SIGKILL)
    await until(lambda: not reading.running)
    assert await two.transfer("next") is Outcome.LANDED
    serving = process(two.a)
    os.kill(serving.pid, signal.SIGKILL)
    await until(lambda: not serving.running)
    assert await asyncio.wait_for(two.transfer("lost"), 20) is Outcome.FAILED
    assert await asyncio.wait_for(two.transfer("last"), 20) is Outcome.LANDED
    assert two.same


def given(rank: Rank) -> Memory:
    """As it is registered."""
    return Memory(-1, BYTES, LAYOUT, MemoryKind.ROCM, rank.memory)


@contextlib.asynccontextmanager
async def ranks(forked: Library, *each: tuple[str, Machine, str]) -> AsyncIterator[tuple[Arena, list[Rank]]]:
    """Processes with memory, each by its name, machine and library; the first one's holds sevens, the others' zeros."""
    async with contextlib.AsyncExitStack() as stack:
        arena = Arena([1 << 30])
        stack.callback(arena.close)
        made: list[Rank] = []
        for name, machine, library in each:
            rank = await Rank.start(forked, to_env(machine=machine), arena, name, 0 if made else 7, BYTES, library)
            stack.push_async_callback(rank.aclose)
            made.append(rank)
        yield arena, made


def moris(forked: Library) -> Callable[[KvdConfig, Arena], Sequence[Transport]]:
    """As `--transport mori` has them, where a driver registers no memory of other processes."""
    env = to_env(machine=FOREIGN)
    return lambda config, arena: (ShmTransport(arena), MoriTransport(arena, FAST, forked, env))


async def test_blocks_stay_fenced_until_the_rank_that_may_write_them_has_ended(forked: Library, tmp_path: Path) -> None:
    """The device is silent, the transfer is given up, its session is torn down, and the library does not let go: the
    consumer hears no end, and its blocks are nobody's, until the process is gone."""
    silent = tmp_path / "silent"
    silent.touch()
    dead = msgspec.structs.replace(FOREIGN, silent=str(silent))
    async with (
        ranks(forked, ("p", FOREIGN, FAKE.api), ("d", dead, "tests.contract.kvd.mori_keeps")) as (_, (src, dst)),
        running_kvd(transports=moris(forked), fence=0.2) as kvd,
        FakeEngine(kvd, layout=LAYOUT, give=[given(src)], hosts=[src]) as p,
        FakeEngine(kvd, layout=LAYOUT, give=[given(dst)], hosts=[dst]) as d,
    ):
        tid = new_id()
        p.scheduler.send(Offer("p", tid, 0, (1, 2), 32, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (3, 4), 0, ticket=p.ticket(tid)))
        mori = kvd.node.transports[1]
        assert isinstance(mori, MoriTransport)
        await until(lambda: any(one.name.startswith("reads") for one in mori.processes()))
        (reading,) = [one for one in mori.processes() if one.name.startswith("reads")]
        await until(lambda: bool(reading._copies))
        began = reading._heard
        await until(lambda: reading._heard > began)  # it has said that it looks for bytes, so it has asked for some
        d.scheduler.send(Cancel(tid, "CANCELLED"))
        await until(lambda: reading.failure != "")  # it was told to end, and has not
        await asyncio.sleep(0.3)
        assert kvd.node.leases.counts(d.engine_id, 64).quarantined == 2
        assert not any(d.heard.values())
        os.kill(reading.pid, signal.SIGKILL)
        assert (await d.end_of("d")).outcome is not Outcome.LANDED
        assert kvd.node.leases.counts(d.engine_id, 64).quarantined == 0


async def test_two_daemons_hand_over_between_ranks_that_host_mori(forked: Library) -> None:
    """From registering by the memory socket to LANDED, with the right bytes and without a process of kvd's; a rank that
    hosts nothing has its memory refused; and with its daemon each rank's mori is gone."""
    peer = PeerConfig(listen="127.0.0.1:0")
    async with ranks(forked, ("p", FOREIGN, FAKE.api), ("d", FOREIGN, FAKE.api)) as (arena, (src, dst)):
        async with (
            running_kvd(transports=moris(forked), peer=peer) as a,
            running_kvd(transports=moris(forked), peer=peer) as b,
            FakeEngine(a, layout=LAYOUT, give=[given(src)], hosts=[src]) as p,
            FakeEngine(b, layout=LAYOUT, give=[given(dst)], hosts=[dst]) as d,
        ):
            tid = new_id()
            p.scheduler.send(Offer("p", tid, 0, (1, 2), 32, Mode.READ))
            d.scheduler.send(Accept("d", tid, 0, (3, 4), 0, ticket=p.ticket(tid)))
            assert (await d.end_of("d", 20.0)).outcome is Outcome.LANDED
            assert count(arena, dst.region, 7) == 2 * 2 * 4096
            mori = b.node.transports[1]
            assert isinstance(mori, MoriTransport)
            assert [one.pid for one in mori.processes()] == [dst.process.pid]
            regions = (await OperatorService(b.node).Describe(kvd_pb2.DescribeRequest(), None)).regions
            assert [region.registered_by for region in regions] == ["the rank's process"]
            client = RegionClient("e", 0, given(src))
            with pytest.raises(InvalidRequest, match="the rank does not host mori itself"):
                await asyncio.to_thread(client.register, str(a.config.memory_socket))
            client.close()
        assert not bound_to(src.process.pid) | bound_to(dst.process.pid)
