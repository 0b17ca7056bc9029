"""nixl between two nodes: what becomes of copies, of memory and of the daemon when the other side fails.

Two transports of one process stand for two daemons; each has nixl processes of its own, which are real. The pause of a
process stands for a network that carries nothing any more.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl import NixlSession, NixlTransport
from pdserve.kvd.transport.nixl_wire import read_card
from pdserve.kvd.transport.port import MappedRegion, Moved, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed

SIZE = 256 << 20
TCP = NixlConfig(tls="tcp", stall=1.0)
SERVER = Path(__file__).with_name("nixl_server.py")


def region(arena: Arena, name: str, fill: int, size: int = SIZE) -> MappedRegion:
    """One rank's memory, every byte the same."""
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, size)
        made = MappedRegion(RegionKey(name, 0), MemoryKind.HOST, size, arena.map(fd, size))
    finally:
        os.close(fd)
    paint(arena, made, fill)
    return made


def paint(arena: Arena, at: MappedRegion, value: int) -> None:
    """Sets every byte."""
    view = arena.view(at.offset, at.size)
    np.frombuffer(view, np.uint8)[:] = value
    view.release()


def count(arena: Arena, at: MappedRegion, value: int) -> int:
    """How many bytes have this value."""
    view = arena.view(at.offset, at.size)
    found = int(np.count_nonzero(np.frombuffer(view, np.uint8) == value))
    view.release()
    return found


def everything(block: int = 64 << 10) -> Runs:
    """The whole region, block by block in an order of its own."""
    order = np.random.default_rng(1).permutation(SIZE // block).astype(np.uint64) * np.uint64(block)
    return Runs(order, order, np.full(len(order), block, np.uint64))


def some(nbytes: int = 4096) -> Runs:
    """The first bytes."""
    return Runs(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.full(1, nbytes, np.uint64))


def readers() -> list[str]:
    """The reading processes of this one that have not ended, as the system knows them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [
                name
                for name in (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if name.startswith(f"reads-{os.getpid()}-")
            ]
    return found


async def until(true: Callable[[], bool]) -> None:
    """Waits for what another process does."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  # of another process there is no event
            await asyncio.sleep(0)


@dataclass
class Nodes:
    """Two daemons' transports, and a region of each: `src` holds sevens, `dst` zeros."""

    arena: Arena
    producer: NixlTransport
    consumer: NixlTransport
    src: MappedRegion
    dst: MappedRegion

    async def described(self) -> RemoteRegion:
        """The source as the other node sees it."""
        return RemoteRegion(self.src.key, self.src.kind, self.src.size, await self.producer.card(self.src))

    async def reach(self) -> NixlSession:
        """A session that has copied before, so that its lanes are up."""
        session = await self.consumer.reach(await self.described(), self.dst)
        await session.start(some()).wait()
        paint(self.arena, self.dst, 0)
        return session

    @property
    def serving(self) -> int:
        """The process id of the producer's serving process."""
        (process,) = self.producer.processes()
        return process.pid

    async def under_way(self) -> None:
        """Waits until a copy of everything has brought its first block."""
        view = self.arena.view(self.dst.offset + int(everything().dst[0]), 1)
        await until(lambda: view[0] == 7)
        view.release()

    async def still(self) -> bool:
        """Whether nothing is written: whatever would be has the time to."""
        before = count(self.arena, self.dst, 7)
        await asyncio.sleep(0.3)
        return count(self.arena, self.dst, 7) == before


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Room for some regions."""
    made = Arena([1 << 32])
    yield made
    made.close()


@pytest.fixture
async def nodes(arena: Arena) -> AsyncIterator[Nodes]:
    """Over tcp, since only there a paused process stops the bytes."""
    made = Nodes(
        arena, NixlTransport(arena, TCP), NixlTransport(arena, TCP), region(arena, "p", 7), region(arena, "d", 0)
    )
    yield made
    await made.consumer.aclose()
    await made.producer.aclose()


async def test_what_carried_a_copy_is_told(nodes: Nodes) -> None:
    """The lanes that UCX says it reads over come with each copy, and are shown with the process."""
    session = await nodes.consumer.reach(await nodes.described(), nodes.dst)
    moved = await session.start(some()).wait()
    assert moved.lanes.startswith("tcp/")
    (process,) = nodes.consumer.processes()
    assert process.lanes == moved.lanes
    await session.close()


async def test_a_peer_that_dies_fails_its_copies_and_no_others(nodes: Nodes, arena: Arena) -> None:
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


async def test_a_peer_that_falls_silent_fails_its_copies_and_writes_nothing_when_it_is_back(nodes: Nodes) -> None:
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


async def test_closing_a_session_does_not_wait_for_a_silent_peer(arena: Arena) -> None:
    """Its copies become terminal, long before the stall would end them, and nothing writes any more. What the peer had
    sent before it fell silent may complete the blocks that were asked for: then it ended early, else it failed."""
    slow = replace(TCP, stall=600.0)
    nodes = Nodes(
        arena, NixlTransport(arena, slow), NixlTransport(arena, slow), region(arena, "p", 7), region(arena, "d", 0)
    )
    session = await nodes.reach()
    copy = session.start(everything())
    await nodes.under_way()
    serving = nodes.serving
    os.kill(serving, signal.SIGSTOP)
    await asyncio.wait_for(session.close(), 10)
    (end,) = await asyncio.gather(copy.wait(), return_exceptions=True)
    if isinstance(end, Moved):
        assert end.cancelled
        assert end.nbytes < SIZE
    else:
        assert isinstance(end, TransferFailed)
        assert "closed session" in end.message
    paint(arena, nodes.dst, 0)
    os.kill(serving, signal.SIGCONT)
    assert await nodes.still()
    assert count(arena, nodes.dst, 7) == 0
    await nodes.consumer.aclose()
    await nodes.producer.aclose()


async def test_a_cancelled_copy_ends_in_the_middle(nodes: Nodes) -> None:
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


async def test_a_serving_process_that_dies_is_replaced_with_the_next_card(nodes: Nodes) -> None:
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
        await reads(nodes, stale)
    assert (await reads(nodes, fresh)).nbytes == 4096


async def reads(nodes: Nodes, src: RemoteRegion) -> Moved:
    """Opens a session, copies something, and closes it."""
    session = await nodes.consumer.reach(src, nodes.dst)
    try:
        return await asyncio.wait_for(session.start(some()).wait(), 20)
    finally:
        await session.close()


async def test_a_reading_process_that_dies_fails_its_copies_and_the_next_session_has_another(nodes: Nodes) -> None:
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
    assert (await reads(nodes, await nodes.described())).nbytes == 4096
    await session.close()


async def test_a_late_read_of_memory_that_was_forgotten_harms_nobody(nodes: Nodes) -> None:
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
    assert (await reads(nodes, RemoteRegion(stays.key, stays.kind, stays.size, card))).nbytes == 4096
    await session.close()


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (b"", "not a card of nixl"),
        (b"gpu_ipc:0000:17:00.0", "not a card of nixl"),
        (msgspec.msgpack.encode(("pdserve.nixl.9", "a", 0, SIZE, b"")), "pdserve.nixl.9"),
        (msgspec.msgpack.encode(("pdserve.nixl.1", "a", 0, SIZE - 1, b"")), "a card of"),
        (msgspec.msgpack.encode(("pdserve.nixl.1", "a", 0, SIZE, os.urandom(300))), "nixl"),
    ],
    ids=["empty", "another transport's", "another version", "too small", "garbage within"],
)
async def test_what_is_no_card_is_refused_and_leaves_nothing(nodes: Nodes, card: bytes, why: str) -> None:
    """By a typed error that says why; no process stays."""
    with pytest.raises(TransferFailed, match=why):
        await nodes.consumer.reach(RemoteRegion(nodes.src.key, MemoryKind.HOST, SIZE, card), nodes.dst)
    assert readers() == []


async def test_an_opening_that_is_given_up_leaves_nothing(nodes: Nodes) -> None:
    """Cancelled while its process starts: the process is ended."""
    opening = asyncio.create_task(nodes.consumer.reach(await nodes.described(), nodes.dst))
    for _ in range(5):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert readers() == []
    assert (await reads(nodes, await nodes.described())).nbytes == 4096


async def test_the_last_session_takes_its_process_along(nodes: Nodes) -> None:
    """Two sessions share the process of a peer; it ends with the second."""
    described = await nodes.described()
    other_dst = region(nodes.arena, "d3", 0)
    first, second = await asyncio.gather(
        nodes.consumer.reach(described, nodes.dst), nodes.consumer.reach(described, other_dst)
    )
    assert len(readers()) == len(nodes.consumer.processes()) == 1
    await first.close()
    await first.close()
    assert (await second.start(some()).wait()).nbytes == 4096
    await second.close()
    assert readers() == []


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_a_daemon_that_is_killed_takes_its_nixl_processes_along(nodes: Nodes) -> None:
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
