"""A rank that takes orders, and kvd's handle on it: what each refuses of the other, and what is over when.

The rank is this process, with the fake mori in it; where it would be ended, another process stands for it.
"""

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.kvd.callers import allowed
from pdserve.kvd.client import Memory, RegionClient
from pdserve.kvd.client.mori_host import MoriHost
from pdserve.kvd.testing.engine import plain_layout
from pdserve.kvd.testing.mori import FAKE
from pdserve.kvd.testing.mori_devices import FakeDeviceMemory
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.mori_hosted import MoriHosted
from pdserve.kvd.transport.rank_host import RankHost
from pdserve.rpc.errors import InvalidRequest, KvdUnavailable, PdserveError, TransferFailed, Unauthenticated
from tests.contract.kvd.mori_suite import FAST

LAYOUT = plain_layout(64)
BYTES = 64 * 2 * 4096


@pytest.fixture
def here() -> "tuple[FakeDeviceMemory, MoriHost]":
    """A rank in this process."""
    memory = FakeDeviceMemory([1 << 20], 7)
    return memory, MoriHost(memory.memory, 0, memory.addresses(), library=FAKE.api)


def host_of(offered: socket.socket) -> RankHost:
    """As kvd has it."""
    with offered:
        return RankHost.taken(offered.fileno(), allowed(()))


def begun(host: RankHost) -> "asyncio.Task[MoriHosted]":
    """An engine in this process."""
    return asyncio.create_task(
        MoriHosted.start(f"here-{os.urandom(4).hex()}", FAST, replace(FAKE, start=host.start), {})
    )


async def test_a_rank_that_registers_again_has_ended_what_was_ordered_before(
    here: tuple[FakeDeviceMemory, MoriHost],
) -> None:
    """So a kvd that is new finds no engine of the last one, which orders nothing any more."""
    memory, rank = here
    last = host_of(rank.offer())
    engine = await begun(last)
    await engine.register_device("e/0", memory.memory)
    present = host_of(await asyncio.to_thread(rank.offer))
    await asyncio.wait_for(engine.gone(), 5)
    with pytest.raises(TransferFailed, match="takes no orders"):
        await begun(last)
    engine = await begun(present)
    await asyncio.to_thread(rank.close)
    await asyncio.wait_for(engine.gone(), 5)
    with pytest.raises(TransferFailed, match="takes no orders"):
        await begun(present)
    last.close()
    present.close()
    memory.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that are left open on purpose
async def test_a_rank_whose_library_kept_its_memory_gives_it_to_no_other_kvd() -> None:
    """What the last one ordered is not over, and kvd is not told that it was; it stands for another process here, whose
    end is what ends it."""
    memory = FakeDeviceMemory([1 << 20], 7)
    rank = MoriHost(memory.memory, 0, memory.addresses(), library="tests.contract.kvd.mori_keeps")
    stand_in = await asyncio.create_subprocess_exec("sleep", "60")
    orders = rank.offer()
    orders.setblocking(False)
    host = RankHost(orders, stand_in.pid, os.pidfd_open(stand_in.pid))
    engine = await begun(host)
    engine.end("a test wants it")
    with pytest.raises(KvdUnavailable, match="not let go"):
        await asyncio.to_thread(rank.offer)
    gone = asyncio.create_task(engine.gone())
    await asyncio.sleep(0.1)
    assert not gone.done()
    stand_in.kill()
    await stand_in.wait()
    await asyncio.wait_for(gone, 5)
    host.close()
    memory.close()


async def test_an_order_that_a_rank_does_not_know_is_refused(here: tuple[FakeDeviceMemory, MoriHost]) -> None:
    """Of another version: by name, and before the library is loaded. What is no order leaves the rank as it is."""
    memory, rank = here
    with rank.offer() as orders:
        orders.send(b"garbage")
        control, theirs = socket.socketpair()
        files, their_files = socket.socketpair()
        with control, theirs, files, their_files:
            order = wire.Engage(wire.ENGAGE_VERSION + 1, ("a", "", "", "RDMA", "127.0.0.1", "1"), {})
            socket.send_fds(orders, [wire.encode(order)], [theirs.fileno(), their_files.fileno()])
            data = await asyncio.to_thread(control.recv, 1 << 16)
        body, *_ = wire.Frames().feed(data)
        answer = wire.decode_from_worker(body)
        assert isinstance(answer, wire.Broken)
        assert f"this rank takes {wire.ENGAGE_VERSION}" in answer.error
    await asyncio.to_thread(rank.close)
    memory.close()


async def test_a_rank_registers_no_memory_but_its_own(here: tuple[FakeDeviceMemory, MoriHost]) -> None:
    """What kvd asks for by another's handles, or for its own use, is refused by an answer."""
    memory, rank = here
    host = host_of(rank.offer())
    engine = await begun(host)
    other = FakeDeviceMemory([1 << 20], 0)
    with pytest.raises(TransferFailed, match="has not given that memory"):
        await engine.register_device("e/0", other.memory)
    with pytest.raises(TransferFailed, match="allocates no memory"):
        await engine.register_own("e/0", memory.memory.bus_id, 4096)
    assert len(await engine.register_device("e/0", memory.memory)) == 1
    await asyncio.to_thread(rank.close)
    host.close()
    other.close()
    memory.close()


async def test_the_death_of_a_rank_is_seen_where_its_sockets_live_on_in_a_fork() -> None:
    """This process holds them, as one that the rank has forked would; the rank is a process of its own."""
    rank = await asyncio.create_subprocess_exec("sleep", "60")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host = RankHost(ours, rank.pid, os.pidfd_open(rank.pid))
    starting = begun(host)
    _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 1 << 16, 2)
    control, files = (socket.socket(fileno=fd) for fd in fds)
    control.sendall(wire.framed(wire.Answer(0, b"card")))
    engine = await starting
    call = asyncio.create_task(engine.register_own("e/0", "0000:1b:00.0", 4096))
    rank.kill()
    await rank.wait()
    with pytest.raises(TransferFailed, match="that it was in has ended"):
        await asyncio.wait_for(call, 5)
    for one in (control, files, theirs):
        one.close()
    host.close()


def test_host_memory_is_not_hosted(here: tuple[FakeDeviceMemory, MoriHost]) -> None:
    """kvd registers that by its own mapping."""
    with pytest.raises(ValueError, match="registered by kvd"):
        RegionClient("e", 0, Memory(0, BYTES, LAYOUT), hosts=here[1])
    here[0].close()


def test_what_takes_orders_is_a_socket_of_a_known_user(tmp_path: Path) -> None:
    """Anything else that comes with memory is refused by name."""
    seqpacket, stream = (
        socket.socketpair(socket.AF_UNIX, kind) for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
    )
    refused: list[tuple[int, frozenset[int], type[PdserveError], str]] = [
        (os.open(tmp_path, os.O_RDONLY), allowed(()), InvalidRequest, "at a socket"),
        (stream[0].detach(), allowed(()), InvalidRequest, "whole messages"),
        (seqpacket[0].detach(), frozenset({os.geteuid() + 1}), Unauthenticated, "--allow-uid"),
    ]
    for fd, users, error, why in refused:
        with pytest.raises(error, match=why):
            RankHost.taken(fd, users)
        os.close(fd)
    seqpacket[1].close()
    stream[1].close()
