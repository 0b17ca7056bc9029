"""nixl between two nodes: what becomes of copies, of memory and of the daemon when the other side fails.

Two transports of one process stand for two daemons; each has nixl processes of its own, which are real. The pause of a
process stands for a network that carries nothing any more.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.nixl_wire import read_card
from pdserve.kvd.transport.port import Moved, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.far_rig import SIZE, Nodes, count, everything, lives, paint, readers, region, some, until
from tests.contract.kvd.standing import standing

TCP = NixlConfig(tls="tcp", stall=1.0)
SERVER = Path(__file__).with_name("nixl_server.py")
SMALL = 1 << 16

Nixls = Nodes[NixlTransport]


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Room for some regions."""
    made = Arena([1 << 32])
    yield made
    made.close()


@contextlib.asynccontextmanager
async def two(arena: Arena, config: NixlConfig, size: int) -> AsyncIterator[Nixls]:
    """Two daemons' transports, with regions of so many bytes."""
    src, dst = region(arena, "p", 7, size), region(arena, "d", 0, size)
    made = Nodes(arena, NixlTransport(arena, config), NixlTransport(arena, config), src, dst)
    try:
        yield made
    finally:
        await made.consumer.aclose()
        await made.producer.aclose()


@pytest.fixture
async def nodes(arena: Arena) -> AsyncIterator[Nixls]:
    """Over tcp, since only there a paused process stops the bytes; so many of them that a copy has a middle."""
    async with two(arena, TCP, SIZE) as made:
        yield made


@pytest.fixture
async def patient(arena: Arena) -> AsyncIterator[Nixls]:
    """The same, but for a stall that does not come."""
    async with two(arena, replace(TCP, stall=600.0), SIZE) as made:
        yield made


@pytest.fixture
async def small(arena: Arena) -> AsyncIterator[Nixls]:
    """64 KiB each, where no copy is to be caught in its middle: half a GiB takes its time to fill."""
    async with two(arena, TCP, SMALL) as made:
        yield made


async def test_what_carried_a_copy_is_told(small: Nixls) -> None:
    """The lanes that UCX says it reads over come with each copy, and are shown with the process."""
    session = await small.consumer.reach(await small.described(), small.dst)
    moved = await session.start(some()).wait()
    assert moved.lanes.startswith("tcp/")
    (process,) = small.consumer.processes()
    assert process.lanes == moved.lanes
    await session.close()


async def test_a_peer_that_dies_fails_its_copies_and_no_others(nodes: Nixls, arena: Arena) -> None:
    """Killed in the middle of a copy: it fails with a reason and writes nothing later; another peer's goes on."""
    third = NixlTransport(arena, TCP)
    other_src, other_dst = region(arena, "p2", 9), region(arena, "d2", 0)
    other = await nodes.consumer.reach(
        RemoteRegion(other_src.key, other_src.kind, other_src.size, await third.card(other_src)), other_dst
    )
    session = await nodes.reach()
    copy, going_on = session.start(everything()), other.start(everything())
    await nodes.under_way()
    os.kill(nodes.serving, signal.SIGKILL)
    with pytest.raises(TransferFailed, match="DISCONNECT"):
        await asyncio.wait_for(copy.wait(), 10)
    assert await nodes.still()
    assert (await going_on.wait()).nbytes == SIZE
    await session.close()
    await other.close()
    await third.aclose()


async def test_a_peer_that_falls_silent_fails_its_copies_and_writes_nothing_when_it_is_back(
    nodes: Nixls,
) -> None:
    """Paused in the middle of a copy: it fails after the stall; once the peer goes on, the blocks stay as they are."""
    session = await nodes.reach()
    copy = session.start(everything())
    await nodes.under_way()
    serving = nodes.serving
    os.kill(serving, signal.SIGSTOP)
    with pytest.raises(TransferFailed, match="no byte came for 1 s"):
        await asyncio.wait_for(copy.wait(), 10)
    paint(nodes.arena, nodes.dst, 0)  # the blocks have a new owner
    os.kill(serving, signal.SIGCONT)
    assert await nodes.still()
    assert count(nodes.arena, nodes.dst, 7) == 0
    await session.close()


async def test_closing_a_session_does_not_wait_for_a_silent_peer(patient: Nixls) -> None:
    """Its copies become terminal, long before the stall would end them, and nothing writes any more. What the peer had
    sent before it fell silent may complete the blocks that were asked for: then it ended early, else it failed."""
    session = await patient.reach()
    copy = session.start(everything())
    await patient.under_way()
    serving = patient.serving
    os.kill(serving, signal.SIGSTOP)
    await asyncio.wait_for(session.close(), 10)
    (end,) = await asyncio.gather(copy.wait(), return_exceptions=True)
    if isinstance(end, Moved):
        assert end.cancelled
        assert end.nbytes < SIZE
    else:
        assert isinstance(end, TransferFailed)
        assert "closed session" in end.message
    paint(patient.arena, patient.dst, 0)
    os.kill(serving, signal.SIGCONT)
    assert await patient.still()
    assert count(patient.arena, patient.dst, 7) == 0


async def test_closing_a_session_whose_copies_wait_leaves_those_before_them(patient: Nixls) -> None:
    """They end at once, though the peer is silent; the copy that they waited for comes to its end once it is back."""
    session, described = await patient.reach(), await patient.described()
    other = await patient.consumer.reach(described, region(patient.arena, "d2", 0))
    copy = session.start(everything())
    await patient.under_way()
    serving = patient.serving
    os.kill(serving, signal.SIGSTOP)
    waiting = [other.start(everything()), other.start(some())]
    await asyncio.wait_for(other.close(), 10)
    for one in waiting:
        moved = await one.wait()
        assert (moved.nbytes, moved.cancelled) == (0, True)
    os.kill(serving, signal.SIGCONT)
    assert (await asyncio.wait_for(copy.wait(), 10)).nbytes == SIZE
    await session.close()


async def test_a_cancelled_copy_ends_in_the_middle(nodes: Nixls) -> None:
    """It ends with some of its bytes, says how many, and nothing of it writes later."""
    session = await nodes.reach()
    copy = session.start(everything())
    await nodes.under_way()
    copy.cancel()
    moved = await asyncio.wait_for(copy.wait(), 10)
    assert moved.cancelled
    assert 0 < moved.nbytes < SIZE
    assert count(nodes.arena, nodes.dst, 7) == moved.nbytes
    assert await nodes.still()
    await session.close()


async def test_a_cancelled_copy_ends_in_the_middle_where_reads_are_over_when_begun(arena: Arena) -> None:
    """Over what UCX takes on one host (cma): it is heard between two chunks, also when the speed is known."""
    async with two(arena, NixlConfig(), SIZE) as nodes:
        session = await nodes.reach()
        await session.start(everything()).wait()
        paint(arena, nodes.dst, 0)
        with standing(nodes.consumer.processes()):
            copy = session.start(everything())
            copy.cancel()
        moved = await asyncio.wait_for(copy.wait(), 10)
        assert moved.cancelled
        assert moved.nbytes < SIZE
        assert count(arena, nodes.dst, 7) == moved.nbytes
        assert await nodes.still()
        await session.close()


async def test_a_serving_process_that_dies_is_replaced_with_the_next_card(nodes: Nixls) -> None:
    """The daemon lives; the old card reaches nothing, a new one does."""
    session = await nodes.reach()
    stale = await nodes.described()
    os.kill(nodes.serving, signal.SIGKILL)
    with pytest.raises(TransferFailed):
        await session.start(everything()).wait()
    await session.close()
    await until(lambda: not nodes.producer.processes())
    fresh = await nodes.described()
    assert fresh.card != stale.card
    with pytest.raises(TransferFailed):
        await nodes.reads(stale)
    assert (await nodes.reads(fresh)).nbytes == 4096


async def test_a_reading_process_that_dies_fails_its_copies_and_the_next_session_has_another(
    nodes: Nixls,
) -> None:
    """Whatever ends it: the copy fails once it is gone, a copy of the dead session is refused, a new session works."""
    session = await nodes.reach()
    copy = session.start(everything())
    await nodes.under_way()
    (process,) = nodes.consumer.processes()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TransferFailed, match="ended by itself"):
        await asyncio.wait_for(copy.wait(), 10)
    assert await nodes.still()
    with pytest.raises(TransferFailed, match="ended by itself"):
        session.start(some())
    assert (await nodes.reads(await nodes.described())).nbytes == 4096
    await session.close()


async def test_a_late_read_of_memory_that_was_forgotten_harms_nobody(nodes: Nixls) -> None:
    """What is read is void, and the serving process goes on with the other regions."""
    session = await nodes.reach()
    stays = region(nodes.arena, "stays", 5, 4096)
    await nodes.producer.card(stays)
    serving = nodes.serving
    await nodes.producer.forget(nodes.src)
    await nodes.producer.forget(nodes.src)
    with contextlib.suppress(TransferFailed):
        await session.start(everything()).wait()
    assert count(nodes.arena, nodes.dst, 7) == 0
    assert nodes.serving == serving
    card = await nodes.producer.card(stays)
    assert (await nodes.reads(RemoteRegion(stays.key, stays.kind, stays.size, card))).nbytes == 4096
    await session.close()


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (b"", "not a card of nixl"),
        (b"gpu_ipc:0000:17:00.0", "not a card of nixl"),
        (msgspec.msgpack.encode(("pdserve.nixl.9", "a", 0, SMALL, b"")), "pdserve.nixl.9"),
        (msgspec.msgpack.encode(("pdserve.nixl.1", "a", 0, SMALL - 1, b"")), "a card of"),
        (msgspec.msgpack.encode(("pdserve.nixl.1", "a", 0, SMALL, os.urandom(300))), "nixl"),
    ],
    ids=["empty", "another transport's", "another version", "too small", "garbage within"],
)
async def test_what_is_no_card_is_refused_and_leaves_nothing(small: Nixls, card: bytes, why: str) -> None:
    """By a typed error that says why; no process stays."""
    with pytest.raises(TransferFailed, match=why):
        await small.consumer.reach(RemoteRegion(small.src.key, MemoryKind.HOST, SMALL, card), small.dst)
    assert readers() == []


async def test_an_opening_that_is_given_up_leaves_nothing(small: Nixls) -> None:
    """Cancelled while its process starts: the process is ended."""
    opening = asyncio.create_task(small.consumer.reach(await small.described(), small.dst))
    for _ in range(5):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert readers() == []
    assert (await small.reads(await small.described())).nbytes == 4096


async def test_the_last_session_takes_its_process_along(small: Nixls) -> None:
    """Two sessions share the process of a peer; it ends with the second."""
    described = await small.described()
    other_dst = region(small.arena, "d3", 0, SMALL)
    first, second = await asyncio.gather(
        small.consumer.reach(described, small.dst), small.consumer.reach(described, other_dst)
    )
    assert len(readers()) == len(small.consumer.processes()) == 1
    await first.close()
    await first.close()
    assert (await second.start(some()).wait()).nbytes == 4096
    await second.close()
    assert readers() == []


async def test_a_daemon_that_is_killed_takes_its_nixl_processes_along(nodes: Nixls) -> None:
    """The other daemon as a process, killed in the middle of a copy: the copy fails, its serving process is gone."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), str(SIZE), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    async with asyncio.timeout(20):
        pid, card = (await server.stdout.readline()).decode().split()
    session = await nodes.consumer.reach(
        RemoteRegion(RegionKey("far", 0), MemoryKind.HOST, SIZE, bytes.fromhex(card)), nodes.dst
    )
    assert read_card(bytes.fromhex(card), SIZE).agent.startswith(f"serves-{server.pid}-")
    copy = session.start(everything())
    await nodes.under_way()
    server.kill()
    await server.wait()
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(copy.wait(), 10)
    await until(lambda: not lives(int(pid)))
    await session.close()
