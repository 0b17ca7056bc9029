"""Memory of devices through mori, on the fakes of its library and of the device: between nodes and between GPUs."""

from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.kvd.config import MoriBackend, MoriConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.testing.mori import Machine, to_env
from pdserve.kvd.testing.mori_devices import BUS_ID, FakeDeviceMemory
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion, TakesDevices
from pdserve.kvd.types import DeviceMemory, MemoryKind, Piece, RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed
from tests.contract.kvd.mori_suite import FAST

MIB = 1 << 20
PIECES = (MIB, 3 * MIB, MIB)
OTHERS = (2 * MIB, MIB, 2 * MIB)
"""The same bytes in all, with borders elsewhere."""
SIZE = sum(PIECES)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """For host memory, which is not used."""
    made = Arena([1 << 30])
    yield made
    made.close()


@pytest.fixture
def memories() -> Iterator[tuple[FakeDeviceMemory, FakeDeviceMemory]]:
    """Sevens, and zeros."""
    made = FakeDeviceMemory(PIECES, 7), FakeDeviceMemory(OTHERS, 0)
    yield made
    for memory in made:
        memory.close()


Memories = tuple[FakeDeviceMemory, FakeDeviceMemory]


def region(rank: int, size: int = SIZE) -> MappedRegion:
    """A region's name."""
    return MappedRegion(RegionKey("e", rank), MemoryKind.ROCM, size, 0)


def config(backend: MoriBackend) -> MoriConfig:
    """With short deadlines."""
    return MoriConfig(backend=backend, stall=FAST.stall, connect=FAST.connect, start=FAST.start, idle=FAST.idle)


def over_borders() -> Runs:
    """A run over every border, and the bytes before the last one not."""
    return Runs(np.array([100], np.uint64), np.array([100], np.uint64), np.array([SIZE - 200], np.uint64))


@pytest.mark.parametrize("backend", MoriBackend)
async def test_device_memory_is_copied_between_its_pieces(
    arena: Arena, memories: Memories, backend: MoriBackend, forked: Library
) -> None:
    """Pieces with borders elsewhere on either side: these bytes and no others."""
    src, dst = memories
    transport = MoriTransport(arena, config(backend), forked, to_env())
    assert isinstance(transport, TakesDevices)
    await transport.take(region(0), src.memory)
    await transport.take(region(1), dst.memory)
    session = await transport.open(region(0), region(1))
    assert (await session.start(over_borders()).wait()).nbytes == SIZE - 200
    assert (np.flatnonzero(dst.bytes() == 7) == np.arange(100, SIZE - 100)).all()
    assert (src.bytes() == 7).all()
    await session.close()
    for rank in (0, 1):
        await transport.give_back(region(rank))
        await transport.give_back(region(rank))
    with pytest.raises(TransferFailed, match="has ended"):
        await transport.card(region(0))
    await transport.aclose()


async def test_device_memory_crosses_nodes(arena: Arena, memories: Memories, forked: Library) -> None:
    """By a card, as host memory does."""
    src, dst = memories
    producer, consumer = (MoriTransport(arena, config(MoriBackend.RDMA), forked, to_env()) for _ in range(2))
    await producer.take(region(0), src.memory)
    await consumer.take(region(1), dst.memory)
    described = RemoteRegion(region(0).key, MemoryKind.ROCM, SIZE, await producer.card(region(0)))
    session = await consumer.reach(described, region(1))
    await session.start(over_borders()).wait()
    assert (dst.bytes() == 7).sum() == SIZE - 200
    await session.close()
    await consumer.aclose()
    await producer.aclose()


@pytest.mark.parametrize("backend", MoriBackend)
async def test_a_device_that_takes_no_memory_of_other_processes_is_found_out(
    arena: Arena, memories: Memories, backend: MoriBackend, forked: Library
) -> None:
    """In processes that are there for it: the library aborts, the region is refused, host memory goes on."""
    transport = MoriTransport(arena, config(backend), forked, to_env(machine=Machine(foreign=False)))
    with pytest.raises(InvalidRequest, match=rf"device {BUS_ID}: .* in another process: .*ended by itself \(-6\)"):
        await transport.take(region(0), memories[0].memory)
    assert transport.processes() == []
    with pytest.raises(TransferFailed, match="has ended"):
        await transport.card(region(0))
    await transport.aclose()


async def test_what_cannot_be_taken_is_refused(arena: Arena, memories: Memories, forked: Library) -> None:
    """Each with its reason, and nothing of it is kept."""
    memory = memories[0].memory
    transport = MoriTransport(arena, config(MoriBackend.RDMA), forked, to_env())
    for wrong, size, why in (
        (DeviceMemory(BUS_ID, memory.pieces, (bytes(64),)), SIZE, "with events"),
        (memory, SIZE + 1, "in pieces of"),
        (DeviceMemory("0000:ff:00.0", memory.pieces), SIZE, "no such device"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            await transport.take(region(0, size), wrong)
    await transport.take(region(0), memory)
    with pytest.raises(InvalidRequest, match="mapped"):
        await transport.take(region(0), memory)
    gone = DeviceMemory(BUS_ID, (Piece(bytes(64), 0, SIZE),))
    await transport.take(region(1), gone)  # the device is known to be good
    with pytest.raises(TransferFailed, match="invalid argument"):
        await transport.card(region(1))
    await transport.aclose()
