"""`sim` between daemons: it reads another process's memory, and nothing that it was not shown."""

import asyncio
import os
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport import vm
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion
from pdserve.kvd.transport.sim import SimTransport
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed
from pdserve.runtime.clock import boot_id

SIZE = 1 << 20


class End:
    """One daemon's arena, with a region of noise, and its transport."""

    def __init__(self, seed: int) -> None:
        self.arena = Arena([1 << 30])
        self.noise = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
        fd = os.memfd_create("end")
        os.write(fd, self.noise)
        self.region = MappedRegion(RegionKey("e", seed), MemoryKind.HOST, SIZE, self.arena.map(fd, SIZE))
        os.close(fd)
        self.transport = SimTransport(self.arena, 1e9)

    @property
    def bytes(self) -> bytes:
        """What the region holds now."""
        view = self.arena.view(self.region.offset, SIZE)
        try:
            return bytes(view)
        finally:
            view.release()

    async def remote(self) -> RemoteRegion:
        """As another daemon hears of it."""
        return RemoteRegion(self.region.key, MemoryKind.HOST, SIZE, await self.transport.card(self.region))


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A source and a destination, each with an arena of its own."""
    a, b = End(1), End(2)
    yield a, b
    a.arena.close()
    b.arena.close()


def runs(src: "list[int]", dst: "list[int]", length: "list[int]") -> Runs:
    """Byte ranges."""
    return Runs(*(np.array(one, np.uint64) for one in (src, dst, length)))


@pytest.mark.parametrize("count", [1, 7, 5000])
async def test_it_reads_exactly_these_bytes(ends: tuple[End, End], count: int) -> None:
    """Scattered runs, more of them than one system call takes."""
    a, b = ends
    random = np.random.default_rng(count)
    block = 128
    src, dst = (random.permutation(SIZE // block)[:count].astype(np.uint64) * np.uint64(block) for _ in range(2))
    expected = bytearray(b.bytes)
    for at, to in zip(src.tolist(), dst.tolist(), strict=True):
        expected[to : to + block] = a.noise[at : at + block]
    session = await b.transport.reach(await a.remote(), b.region)
    moved = await session.start(Runs(src, dst, np.full(count, block, np.uint64))).wait()
    assert moved.nbytes == count * block
    assert b.bytes == bytes(expected)
    assert a.bytes == a.noise


async def test_a_run_that_leaves_a_region_is_refused(ends: tuple[End, End]) -> None:
    """On either side, before anything is read."""
    a, b = ends
    session = await b.transport.reach(await a.remote(), b.region)
    for plan in (runs([SIZE - 5], [0], [10]), runs([0], [SIZE - 5], [10])):
        with pytest.raises(TransferFailed):
            session.start(plan)
    assert b.bytes == b.noise


async def test_a_card_that_is_none_or_of_another_host_is_refused(ends: tuple[End, End]) -> None:
    """By name."""
    a, b = ends
    good = await a.remote()
    elsewhere = msgspec.msgpack.encode(("another host's boot", os.getpid(), 1, 4096))
    for card, words in ((b"", "not a card"), (b"\x93nixl", "not a card"), (elsewhere, "of this host only")):
        with pytest.raises(TransferFailed, match=words):
            await b.transport.reach(RemoteRegion(good.key, good.kind, good.size, card), b.region)


async def test_another_process_is_read_until_it_is_gone(ends: tuple[End, End]) -> None:
    """A copy from one that has died, or whose number another process has now, fails."""
    _, b = ends
    program = (
        "import ctypes, sys; data = ctypes.create_string_buffer(b'x' * 4096);"
        "print(ctypes.addressof(data), flush=True); sys.stdin.read()"
    )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    address = int(await child.stdout.readline())
    try:
        card = msgspec.msgpack.encode((boot_id(), child.pid, vm.born(child.pid), address))
        other = msgspec.msgpack.encode((boot_id(), child.pid, vm.born(child.pid) + 1, address))
        key = RegionKey("far", 0)
        session = await b.transport.reach(RemoteRegion(key, MemoryKind.HOST, 4096, card), b.region)
        await session.start(runs([0], [0], [4096])).wait()
        assert b.bytes[:4096] == b"x" * 4096
        younger = await b.transport.reach(RemoteRegion(key, MemoryKind.HOST, 4096, other), b.region)
        with pytest.raises(TransferFailed, match="gone"):
            await younger.start(runs([0], [0], [10])).wait()
    finally:
        child.kill()
        await child.communicate()
    with pytest.raises(TransferFailed):
        await session.start(runs([0], [0], [10])).wait()


async def test_memory_that_is_not_there_fails_the_copy(ends: tuple[End, End]) -> None:
    """Part of it is mapped, the rest is not: an error, and no claim that all has come."""
    a, b = ends
    good = await a.remote()
    session = await b.transport.reach(RemoteRegion(good.key, good.kind, SIZE * 2, good.card), b.region)
    with pytest.raises(TransferFailed, match="cannot be read"):
        await session.start(runs([SIZE - 100, SIZE + 4096], [0, 4096], [100, 100])).wait()
