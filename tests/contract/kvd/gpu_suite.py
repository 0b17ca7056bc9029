"""What the gpu_ipc transport promises, for any accelerator: here a fake one, in tests/hw a real one.

A module that runs it imports every test of it, and has a fixture `gpu` that gives a Rig.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import DeviceMemory, MemoryKind, Piece, RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed

MIB = 1 << 20
PIECES = (MIB, 3 * MIB, 512 << 10)
OTHERS = (512 << 10, 2 * MIB, 2 * MIB)
"""The same bytes in all, with borders elsewhere."""
SIZE = sum(PIECES)

Bytes = NDArray[np.uint8]


class Owned(Protocol):
    """One rank's memory, as its engine sees it."""

    @property
    def memory(self) -> DeviceMemory:
        """As its engine gives it away."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def bytes(self) -> Bytes:
        """A copy of the region's bytes."""
        ...

    def around(self) -> Bytes:
        """A copy of what lies around the pieces."""
        ...


@dataclass
class Rig:
    """A transport, and engines' memory: `make(sizes, seed)`. `real`: on an accelerator."""

    transport: GpuIpcTransport
    make: Callable[[Sequence[int], int], Owned]
    kind: MemoryKind
    real: bool = False

    def region(self, rank: int, size: int = SIZE) -> MappedRegion:
        """A region's name."""
        return MappedRegion(RegionKey("e", rank), self.kind, size, 0)

    async def take(self, rank: int, owned: Owned) -> MappedRegion:
        """Takes a rank's memory."""
        region = self.region(rank, owned.size)
        await self.transport.take(region, owned.memory)
        return region

    async def pair(self) -> "Pair":
        """Two ranks' memory, taken."""
        src, dst = self.make(PIECES, 1), self.make(OTHERS, 2)
        await self.take(0, src)
        await self.take(1, dst)
        return Pair(src, dst, self.region(0), self.region(1))


@dataclass
class Pair:
    """See Rig.pair."""

    src: Owned
    dst: Owned
    a: MappedRegion
    b: MappedRegion


def runs(*pieces: tuple[int, int, int]) -> Runs:
    """(source offset, destination offset, bytes) each."""
    src, dst, length = zip(*pieces, strict=True) if pieces else ((), (), ())
    return Runs(np.array(src, np.uint64), np.array(dst, np.uint64), np.array(length, np.uint64))


def scattered(seed: int, block: int, count: int) -> Runs:
    """Random blocks to random blocks."""
    random = np.random.default_rng(seed)
    print(f"seed {seed}")
    pick = [random.permutation(SIZE // block)[:count].astype(np.uint64) * np.uint64(block) for _ in range(2)]
    return Runs(pick[0], pick[1], np.full(len(pick[0]), block, np.uint64))


def applied(pair: Pair, plan: Runs) -> Bytes:
    """What the destination must hold after a plan."""
    expected, source = pair.dst.bytes(), pair.src.bytes()
    for at, to, count in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
        expected[to : to + count] = source[at : at + count]
    return expected


@pytest.mark.parametrize("block", [16, 112, 4096, 16 << 10, 304 << 10])
async def test_copies_these_bytes_and_no_others(gpu: Rig, block: int) -> None:
    """Scattered runs, tiny to large, many over the borders of pieces: the destination is as a plain copy makes it; the
    source, and what lies around both, is untouched."""
    pair = await gpu.pair()
    plan = scattered(block, block, min(2000, SIZE // block))
    expected, source = applied(pair, plan), pair.src.bytes()
    around = pair.src.around(), pair.dst.around()
    session = await gpu.transport.open(pair.a, pair.b)
    moved = await session.start(plan).wait()
    assert (pair.dst.bytes() == expected).all()
    assert (pair.src.bytes() == source).all()
    assert (pair.src.around() == around[0]).all()
    assert (pair.dst.around() == around[1]).all()
    assert (moved.nbytes, moved.cancelled) == (plan.total, False)
    assert moved.ns > 0
    await session.close()


async def test_runs_of_unequal_length_over_many_borders(gpu: Rig) -> None:
    """One run over every border beside tiny ones: each byte arrives once."""
    pair = await gpu.pair()
    plan = runs((0, 0, 16), (256, 4096, SIZE - 8192), (SIZE - 16, SIZE - 32, 16), (16, SIZE - 4096, 1024))
    expected = applied(pair, plan)
    session = await gpu.transport.open(pair.a, pair.b)
    assert (await session.start(plan).wait()).nbytes == plan.total
    assert (pair.dst.bytes() == expected).all()
    await session.close()


async def test_nothing_to_copy_is_done_at_once(gpu: Rig) -> None:
    """An empty plan moves nothing and is terminal."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    assert (await session.start(runs()).wait()).nbytes == 0
    await session.close()


async def test_copies_of_one_session_keep_their_order(gpu: Rig) -> None:
    """Two copies to one place: the later one's bytes are there at the end."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    first, second = session.start(runs((0, 0, 4096))), session.start(runs((8192, 0, 4096)))
    await asyncio.gather(first.wait(), second.wait())
    assert (pair.dst.bytes()[:4096] == pair.src.bytes()[8192:12288]).all()
    await session.close()


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ((SIZE - 16, 0, 32), "leaves"),
        ((0, SIZE - 16, 32), "leaves"),
        ((0, 2**64 - 16, 32), "leaves"),
        ((8, 0, 16), "multiples"),
        ((0, 8, 16), "multiples"),
        ((0, 0, 24), "multiples"),
    ],
)
async def test_a_run_that_cannot_be_copies_nothing(gpu: Rig, bad: tuple[int, int, int], told: str) -> None:
    """Out of its region or not aligned: refused before any byte moves, also the good runs beside it."""
    pair = await gpu.pair()
    before = pair.dst.bytes()
    session = await gpu.transport.open(pair.a, pair.b)
    with pytest.raises(TransferFailed, match=told):
        session.start(runs((0, 0, 4096), bad))
    assert (pair.dst.bytes() == before).all()
    await session.close()


async def test_after_close_nothing_is_written_and_nothing_waits(gpu: Rig) -> None:
    """Close makes every copy terminal; what is in the destination then stays; a new copy is refused."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    copies = [session.start(scattered(i, 4096, 250)) for i in range(20)]
    await session.close()
    then = pair.dst.bytes()
    results = await asyncio.wait_for(asyncio.gather(*(c.wait() for c in copies), return_exceptions=True), 5)
    assert all(isinstance(r, TransferFailed) or getattr(r, "nbytes", -1) >= 0 for r in results)
    assert (pair.dst.bytes() == then).all()
    with pytest.raises(TransferFailed, match="closed"):
        session.start(runs((0, 0, 16)))
    await session.close()


async def test_a_cancelled_copy_is_terminal_and_says_so(gpu: Rig) -> None:
    """Cancelled at once: it ends early, moved less than asked, and writes nothing later."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    copy = session.start(runs((0, 0, SIZE)))
    copy.cancel()
    copy.cancel()
    moved = await asyncio.wait_for(copy.wait(), 5)
    then = pair.dst.bytes()
    assert moved.cancelled
    assert moved.nbytes < SIZE
    assert (pair.dst.bytes() == then).all()
    await session.close()


async def test_waiting_can_be_given_up_without_harm(gpu: Rig) -> None:
    """A waiter that is cancelled does not stop the copy: it still becomes terminal with all bytes."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    plan = scattered(3, 4096, 250)
    expected = applied(pair, plan)
    copy = session.start(plan)
    waiter = asyncio.create_task(copy.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (await copy.wait()).nbytes == plan.total
    assert (pair.dst.bytes() == expected).all()
    await session.close()


async def test_memory_that_cannot_be_is_refused_and_leaves_nothing(gpu: Rig) -> None:
    """A device that is not there, handles of nothing, pieces that leave their allocation or are not aligned, another
    size than said, and a second time: each refused by InvalidRequest; the same memory as it is is taken after that."""
    owned = gpu.make(PIECES, 1)
    good = owned.memory
    first, rest = good.pieces[0], good.pieces[1:]
    wrong = {
        "device": DeviceMemory("0000:ff:1f.0", good.pieces),
        "no such allocation": DeviceMemory(good.bus_id, (*rest, Piece(bytes(64), 0, 4096))),
        "handle of 3 bytes": DeviceMemory(good.bus_id, (*rest, Piece(b"abc", 0, 4096))),
        "beyond": DeviceMemory(good.bus_id, (Piece(first.handle, first.offset, 64 * MIB), *rest)),
        "before": DeviceMemory(good.bus_id, (Piece(first.handle, -16, first.size), *rest)),
        "not aligned": DeviceMemory(good.bus_id, (Piece(first.handle, 8, first.size - 16), *rest)),
        "no pieces": DeviceMemory(good.bus_id, ()),
        "no such event": DeviceMemory(good.bus_id, good.pieces, (bytes(64),) * 4),
        "size": DeviceMemory(good.bus_id, good.pieces[:2]),
    }
    for name, memory in wrong.items():
        with pytest.raises(InvalidRequest) as caught:
            await gpu.transport.take(gpu.region(0), memory)
        print(f"{name}: {caught.value}")
    await gpu.take(0, owned)
    with pytest.raises(InvalidRequest, match="mapped already"):
        await gpu.take(0, owned)


async def test_memory_that_was_given_back_can_be_taken_again(gpu: Rig) -> None:
    """As after a restart of kvd's connection: a session of the old one is refused, the new one copies."""
    pair = await gpu.pair()
    await gpu.transport.give_back(pair.a)
    await gpu.transport.give_back(pair.a)
    with pytest.raises(TransferFailed, match="ended"):
        await gpu.transport.open(pair.a, pair.b)
    await gpu.take(0, pair.src)
    session = await gpu.transport.open(pair.a, pair.b)
    await session.start(runs((0, 0, SIZE))).wait()
    assert (pair.dst.bytes() == pair.src.bytes()).all()
    await session.close()


async def test_a_region_of_itself_and_both_ways(gpu: Rig) -> None:
    """Sessions from a region to itself and back share what is mapped; closing one leaves the others alone."""
    pair = await gpu.pair()
    there, back, itself = [
        await gpu.transport.open(*ends) for ends in ((pair.a, pair.b), (pair.b, pair.a), (pair.a, pair.a))
    ]
    await there.close()
    expected = pair.dst.bytes()[:4096]
    await back.start(runs((0, MIB, 4096))).wait()
    await itself.start(runs((MIB, 0, 4096))).wait()
    assert (pair.src.bytes()[:4096] == expected).all()
    await itself.close()
    await back.close()
