"""mori between two nodes, on the fake of its library: what becomes of copies, of memory and of the daemon when the
other side fails, and when mori's processes sleep.

Two transports of one process stand for two daemons; their mori processes are real, and so are the bytes.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdserve.kvd.config import KvdConfig, MoriConfig, TransportName
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.testing.mori import Machine, to_env
from pdserve.kvd.transport.make import make_transports
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library, MoriProcess
from pdserve.kvd.transport.mori_wire import read_card
from pdserve.kvd.transport.port import Moved, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError, TransferFailed
from pdserve.runtime.config import ClusterKey
from tests.contract.kvd.far_rig import Nodes, count, lives, paint, readers, region, some, until
from tests.contract.kvd.mori_suite import FAST, SIZE, Bench, used, whole

SERVER = Path(__file__).with_name("mori_server.py")
SLOW = Machine(rate=SIZE / 0.4)

Moris = Nodes[MoriTransport]


@pytest.fixture
def bench(tmp_path: Path, forked: Library) -> Bench:
    """The whole fake."""
    return Bench(tmp_path, forked)


@pytest.fixture(params=[False, True], ids=["in kvd's processes", "in ranks'"])
def either(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """mori in both of its places, one after the other."""
    return replace(bench, hosted=request.param)


@pytest.fixture
async def either_nodes(either: Bench) -> AsyncIterator[Moris]:
    """As `nodes`."""
    async with either.nodes(consumer=SLOW) as made:
        yield made


@pytest.fixture
async def nodes(bench: Bench) -> AsyncIterator[Moris]:
    """The consumer's device takes 0.4 s for all of a region."""
    async with bench.nodes(consumer=SLOW) as made:
        yield made


def the(nodes: Moris) -> tuple[MoriProcess, MoriProcess]:
    """The process that serves, and the one that reads."""
    (serving,), (reading,) = nodes.producer.processes(), nodes.consumer.processes()
    return serving, reading


def silenced(machine: Machine, by: Path) -> Machine:
    """The machine, with a file that silences its device while it is there."""
    return msgspec.structs.replace(machine, silent=str(by))


async def test_a_failure_of_one_peer_lets_the_copies_from_another_end(bench: Bench) -> None:
    """The process ends for the one, after the other's bytes are in place; new sessions have another process."""
    async with bench.nodes(consumer=SLOW) as nodes:
        third = MoriTransport(nodes.arena, FAST, bench.library, to_env())
        src, dst = region(nodes.arena, "p2", 9, SIZE), region(nodes.arena, "d2", 0, SIZE)
        described = RemoteRegion(src.key, src.kind, src.size, await third.card(src))
        other = await nodes.consumer.reach(described, dst)
        session = await nodes.reach()
        going_on = other.start(whole())
        await nodes.producer.forget(nodes.src)
        failing = session.start(whole())
        with pytest.raises(TransferFailed, match="remote access error"):
            await asyncio.wait_for(failing.wait(), 5)
        assert (await going_on.wait()).nbytes == SIZE
        assert count(nodes.arena, dst, 9) == SIZE
        assert count(nodes.arena, nodes.dst, 7) == 0
        assert other.over
        await session.close()
        await other.close()
        assert (await nodes.reads(await nodes.described())).nbytes == 4096
        await third.aclose()


async def test_a_session_of_a_process_that_is_about_to_end_begins_nothing(bench: Bench) -> None:
    """While other copies come to their ends: refused with the reason, and closing it takes none of those away."""
    async with bench.nodes(consumer=SLOW) as nodes:
        session, described = await nodes.reach(), await nodes.described()
        _, reading = the(nodes)
        copy = session.start(whole())
        await nodes.under_way()
        reading.retire("a test wants it")
        assert session.over
        with pytest.raises(TransferFailed, match="takes no more: a test wants it"):
            session.start(some())
        again = await nodes.consumer.reach(described, nodes.dst)
        closing = asyncio.create_task(session.close())
        assert (await copy.wait()).nbytes == SIZE
        await closing
        assert (await again.start(some()).wait()).nbytes == 4096
        await again.close()


async def test_closing_a_session_does_not_wait_for_a_silent_peer(either: Bench) -> None:
    """Its copies become terminal, long before the stall would end them, and nothing writes any more."""
    silent = either.file("silent")
    async with either.nodes(consumer=silenced(SLOW, silent), config=replace(FAST, stall=600.0)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        silent.touch()
        await asyncio.wait_for(session.close(), 5)
        (end,) = await asyncio.gather(copy.wait(), return_exceptions=True)
        assert isinstance(end, TransferFailed)
        assert "closed session" in end.message
        paint(nodes.arena, nodes.dst, 0)
        silent.unlink()
        assert await nodes.still()
        assert count(nodes.arena, nodes.dst, 7) == 0


async def test_closing_a_session_whose_copies_wait_leaves_those_before_them(bench: Bench) -> None:
    """They end at once, though the peer is silent; the copy that they waited for comes to its end once it is back."""
    silent = bench.file("silent")
    async with bench.nodes(consumer=silenced(SLOW, silent), config=replace(FAST, stall=600.0)) as nodes:
        session, described = await nodes.reach(), await nodes.described()
        other = await nodes.consumer.reach(described, region(nodes.arena, "d2", 0, SIZE))
        copy = session.start(whole())
        await nodes.under_way()
        silent.touch()
        waiting = [other.start(whole()), other.start(some())]
        await asyncio.wait_for(other.close(), 5)
        for one in waiting:
            moved = await one.wait()
            assert (moved.nbytes, moved.cancelled) == (0, True)
        silent.unlink()
        assert (await asyncio.wait_for(copy.wait(), 5)).nbytes == SIZE
        await session.close()


async def test_a_peer_that_falls_silent_fails_its_copies_and_writes_nothing_later(either: Bench) -> None:
    """After the stall the process that read is gone, whatever the network then brings."""
    silent = either.file("silent")
    async with either.nodes(consumer=silenced(SLOW, silent)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        silent.touch()
        with pytest.raises(TransferFailed, match="no byte came for 1 s"):
            await asyncio.wait_for(copy.wait(), 5)
        paint(nodes.arena, nodes.dst, 0)
        silent.unlink()
        assert await nodes.still()
        assert count(nodes.arena, nodes.dst, 7) == 0
        await session.close()


async def test_a_daemon_that_was_held_up_does_not_take_its_process_for_a_silent_one(either: Bench) -> None:
    """What came while the loop stood still counts, though the watch's time is over."""
    async with either.nodes(consumer=Machine(rate=SIZE / 5), config=replace(FAST, connect=0.1)) as nodes:
        session = await nodes.reach()
        copy = session.start(whole())
        await nodes.under_way()
        time.sleep(3.4)  # noqa: ASYNC251  # more than the watch waits
        assert (await copy.wait()).nbytes == SIZE
        await session.close()


async def test_a_reading_process_that_dies_fails_its_copies_and_the_next_session_has_another(nodes: Moris) -> None:
    """Whatever ends it: the copy fails once it is gone, a copy of the dead session is refused, a new session works."""
    session = await nodes.reach()
    copy = session.start(whole())
    await nodes.under_way()
    _, reading = the(nodes)
    os.kill(reading.pid, signal.SIGABRT)
    with pytest.raises(TransferFailed, match=r"ended by itself \(-6\)"):
        await asyncio.wait_for(copy.wait(), 5)
    assert await nodes.still()
    with pytest.raises(TransferFailed, match="ended by itself"):
        session.start(some())
    assert (await nodes.reads(await nodes.described())).nbytes == 4096
    await session.close()


async def test_a_way_to_a_region_that_is_not_mapped_is_refused(either_nodes: Moris) -> None:
    """By an answer: the process, and the sessions that it has, go on."""
    session = await either_nodes.reach()
    serving, reading = the(either_nodes)
    with pytest.raises(TransferFailed, match="the region gone/0 is not mapped"):
        await reading.reach("peer", "gone/0", serving.card, ())
    assert (await session.start(some()).wait()).nbytes == 4096
    await session.close()


async def test_memory_of_another_process_is_registered_by_its_mapping(nodes: Moris) -> None:
    """The engine's process never loads mori: what it writes is read, and what is read it sees."""
    fd = os.dup(nodes.arena.file(nodes.src.offset))
    writer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import os; os.pwrite({fd}, bytes([5]) * 4096, 0)"), pass_fds=(fd,)
    )
    await writer.wait()
    os.close(fd)
    session = await nodes.consumer.reach(await nodes.described(), nodes.dst)
    await session.start(some()).wait()
    assert os.pread(nodes.arena.file(nodes.dst.offset), 4096, 0) == bytes([5]) * 4096
    await session.close()


async def test_the_side_that_is_read_is_told_of_nobody(either_nodes: Moris) -> None:
    """One side alone knows the other: the serving process is asked for its memory, and for nothing else."""
    session = await either_nodes.reach()
    serving, _ = the(either_nodes)
    os.kill(serving.pid, signal.SIGSTOP)  # it could not do a thing
    assert (await asyncio.wait_for(session.start(whole()).wait(), 5)).nbytes == SIZE
    os.kill(serving.pid, signal.SIGCONT)
    await session.close()


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (b"", "not a card of mori"),
        (msgspec.msgpack.encode(("pdserve.nixl.1", "a", 0, SIZE, b"")), "not a card of mori"),
        (msgspec.msgpack.encode(("pdserve.mori.9", "a", "rdma", SIZE, b"", ())), r"pdserve\.mori\.9"),
        (msgspec.msgpack.encode(("pdserve.mori.1", "a", "xgmi", SIZE, b"", ())), "uses xgmi, this one rdma"),
        (msgspec.msgpack.encode(("pdserve.mori.1", "a", "rdma", SIZE - 1, b"", ())), "a card of"),
        (msgspec.msgpack.encode(("pdserve.mori.1", "a", "rdma", SIZE, os.urandom(99), ((SIZE, b""),))), "mori"),
    ],
    ids=["empty", "another transport's", "another version", "another backend", "another size", "garbage within"],
)
async def test_what_is_no_card_is_refused_and_leaves_nothing(nodes: Moris, card: bytes, why: str) -> None:
    """By a typed error that says why; no process stays."""
    with pytest.raises(TransferFailed, match=why):
        await nodes.consumer.reach(RemoteRegion(nodes.src.key, MemoryKind.HOST, SIZE, card), nodes.dst)
    assert readers() == []


async def test_an_opening_that_is_given_up_leaves_nothing(either_nodes: Moris) -> None:
    """Cancelled while its process starts: the process is ended."""
    opening = asyncio.create_task(either_nodes.consumer.reach(await either_nodes.described(), either_nodes.dst))
    for _ in range(5):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert readers() == []
    assert (await either_nodes.reads(await either_nodes.described())).nbytes == 4096


async def test_the_last_session_takes_its_process_along(nodes: Moris) -> None:
    """Sessions with any peer share the process that reads; it ends with the last."""
    described = await nodes.described()
    other_dst = region(nodes.arena, "d3", 0, SIZE)
    first, second = await asyncio.gather(
        nodes.consumer.reach(described, nodes.dst), nodes.consumer.reach(described, other_dst)
    )
    assert len(readers()) == len(nodes.consumer.processes()) == 1
    await first.close()
    await first.close()
    assert (await second.start(some()).wait()).nbytes == 4096
    await second.close()
    assert readers() == []


async def test_processes_that_were_told_to_spin_do_not_sleep(bench: Bench) -> None:
    """A core each, as the flag says."""
    async with bench.nodes(config=replace(FAST, spin=True)) as nodes:
        await nodes.described()
        (serving,) = nodes.producer.processes()
        before = used(serving.pid)
        await asyncio.sleep(2 * FAST.idle + 0.3)
        assert not serving.asleep
        assert used(serving.pid) > before


async def test_a_process_that_sleeps_is_woken_by_a_caller(nodes: Moris) -> None:
    """The first session of another node finds it as quickly as one awake, and it goes back to sleep."""
    described = await nodes.described()
    (serving,) = nodes.producer.processes()
    await until(lambda: serving.asleep)
    assert (await asyncio.wait_for(nodes.reads(described), 5)).nbytes == 4096
    await until(lambda: serving.asleep)
    await nodes.producer.forget(nodes.src)  # woken by kvd
    assert not serving.asleep


async def test_a_process_whose_caller_is_not_done_does_not_sleep(nodes: Moris) -> None:
    """A connection to its control port that is open keeps it awake, so that nobody waits for one that is stopped."""
    await nodes.described()
    (serving,) = nodes.producer.processes()
    _, caller = await asyncio.open_connection("127.0.0.1", serving.port)
    await asyncio.sleep(3 * FAST.idle)
    assert not serving.asleep
    caller.close()
    await caller.wait_closed()
    await until(lambda: serving.asleep)


@pytest.mark.parametrize("idle", [0.2, 600.0], ids=["asleep", "awake"])
async def test_a_daemon_that_is_killed_takes_its_mori_processes_along(nodes: Moris, idle: float) -> None:
    """The other daemon as a process, killed in the middle of a copy: its serving process is gone, also one that sleeps,
    and the copy ends as one from a peer that is silent."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SERVER), str(SIZE), str(idle)),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert server.stdout is not None
    assert server.stdin is not None
    async with asyncio.timeout(20):
        pid, card = (await server.stdout.readline()).decode().split()
    far = RemoteRegion(RegionKey("far", 0), MemoryKind.HOST, SIZE, bytes.fromhex(card))
    session = await nodes.consumer.reach(far, nodes.dst)
    assert read_card(far.card, "rdma", SIZE).name.startswith(f"serves-{server.pid}-")
    async with asyncio.timeout(10):
        said = b""
        while said != f"{idle < 1}\n".encode():
            server.stdin.write(b"\n")
            said = await server.stdout.readline()
    copy = session.start(whole())
    await nodes.under_way()
    server.kill()
    await server.wait()
    with pytest.raises(TransferFailed, match="no byte came"):
        await asyncio.wait_for(copy.wait(), 10)
    await until(lambda: not lives(int(pid)))
    await session.close()


def test_a_daemon_that_is_told_to_use_mori_says_what_to_install(tmp_path: Path) -> None:
    """It is not installed here; that is said at its start, and not when the first transfer fails."""
    config = KvdConfig(tmp_path, transport=TransportName.MORI)
    with pytest.raises(ConfigError, match=r"the extra `mori`"):
        make_transports(config, None)  # type: ignore[arg-type]  # not reached


def test_a_control_port_that_other_nodes_cannot_call_is_refused(tmp_path: Path) -> None:
    """A daemon with peers on other hosts, and mori on loopback."""
    key = ClusterKey(b"0123456789abcdef", given=True)
    peer = PeerConfig(listen="10.0.0.1:7000")
    with pytest.raises(ConfigError, match="--mori-host"):
        KvdConfig(tmp_path, transport=TransportName.MORI, cluster_key=key, peer=peer, insecure=True)
    made = MoriConfig(host="10.0.0.1")
    KvdConfig(tmp_path, transport=TransportName.MORI, cluster_key=key, peer=peer, insecure=True, mori=made)


async def test_copies_say_how_many_bytes_they_moved(either_nodes: Moris) -> None:
    """Many runs, some longer than a request may be cut to; every byte once."""
    session = await either_nodes.reach()
    moved = await session.start(whole()).wait()
    assert moved == Moved(SIZE, moved.ns)
    assert count(either_nodes.arena, either_nodes.dst, 7) == SIZE
    await session.close()
