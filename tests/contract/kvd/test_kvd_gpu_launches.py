"""Who launches a copy's first batch, on a fake accelerator that fails where two threads call it at a time."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pdserve.kvd.testing.device import FakeDeviceMemory
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.port import Session
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.gpu_fake import FakeRig, fake_rig
from tests.contract.kvd.gpu_suite import MIB, OTHERS, PIECES, SIZE, Pair, applied, runs, scattered


@pytest.fixture
async def gpu() -> AsyncIterator[FakeRig]:
    """All on one device."""
    async with fake_rig() as rig:
        yield rig


async def _warm(gpu: FakeRig) -> tuple[Pair, Session, list[int]]:
    """A session that has copied, and the threads that launch from now on."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    await session.start(runs((0, 0, 16))).wait()
    gpu.device.launches.clear()
    threads: list[int] = []
    gpu.device.before = lambda _: threads.append(threading.get_ident())
    return pair, session, threads


async def test_the_first_copy_of_a_session_is_the_threads(gpu: FakeRig) -> None:
    """What a first launch may have to wait for, such as a kernel that is compiled, holds the event loop up nowhere."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    threads: list[int] = []
    gpu.device.before = lambda _: threads.append(threading.get_ident())
    await session.start(runs((0, 0, SIZE))).wait()
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads
    await session.close()


async def test_a_later_copy_begins_at_once_and_goes_on_in_the_thread(gpu: FakeRig) -> None:
    """Its first batch is with the device when `start` returns; the thread launches the others. All bytes arrive."""
    pair, session, threads = await _warm(gpu)
    plan = scattered(3, 4096, 800)
    expected = applied(pair, plan)
    copy = session.start(plan)
    assert threads == [threading.get_ident()]
    moved = await copy.wait()
    assert moved.nbytes == plan.total > 2 * MIB
    assert threading.get_ident() not in threads[1:]
    assert (pair.dst.bytes() == expected).all()
    await session.close()


async def test_while_the_thread_has_something_to_do_nobody_else_launches(gpu: FakeRig) -> None:
    """A second copy, of this session or another, is behind the first; so is one behind memory that is mapped."""
    pair, session, threads = await _warm(gpu)
    other = await gpu.transport.open(pair.b, pair.a)
    await other.start(runs((0, 0, 16))).wait()
    threads.clear()
    held = threading.Event()

    def hold(_: object) -> None:
        threads.append(threading.get_ident())
        if threading.get_ident() != loop:
            assert held.wait(10)

    loop = threading.get_ident()
    gpu.device.before = hold
    first = session.start(runs((0, 0, 2 * MIB)))
    behind = [session.start(runs((0, 0, 16))), other.start(runs((0, 0, 16)))]
    opening = asyncio.create_task(gpu.transport.open(pair.a, pair.a))
    await asyncio.sleep(0)
    last = other.start(runs((16, 16, 16)))
    assert threads.count(loop) == 1
    held.set()
    for copy in (first, *behind, last):
        assert not (await copy.wait()).cancelled
    assert threads.count(loop) == 1
    for one in (session, other, await opening):
        await one.close()


async def test_a_copy_does_not_overtake_one_that_waits_for_its_layer(gpu: FakeRig) -> None:
    """Also where the layer is computed in the moment in which the later one starts."""
    src = FakeDeviceMemory(gpu.gpus, PIECES, 1, layers=2)
    await gpu.take(0, src)
    await gpu.take(1, FakeDeviceMemory(gpu.gpus, OTHERS, 2))
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    await session.start(runs((0, 0, 16))).wait()
    gpu.device.launches.clear()
    for event in src.events:
        event.passed = False
    gpu.transport.announced(RegionKey("e", 0), 0, 0)
    first = session.start(runs((0, 0, 4096)))
    for event in src.events:
        event.passed = True
    second = session.start(runs((0, 0, 32)))
    await asyncio.gather(first.wait(), second.wait())
    assert gpu.device.launches == [4096, 32]
    await session.close()


async def test_a_copy_that_cannot_begin_says_so_and_leaves_the_next_one_alone(gpu: FakeRig) -> None:
    """The device's words; nothing is with it then, and closing waits for nothing."""
    pair, session, _ = await _warm(gpu)

    def fails(_: object) -> None:
        raise DeviceFailed("out of memory")

    gpu.device.before = fails
    with pytest.raises(TransferFailed, match="out of memory"):
        await session.start(runs((0, 0, MIB))).wait()
    gpu.device.before = None
    assert (await session.start(runs((0, 0, MIB))).wait()).nbytes == MIB
    assert (pair.dst.bytes()[:MIB] == pair.src.bytes()[:MIB]).all()
    await session.close()


async def test_a_copy_that_began_at_once_is_cancelled_like_any(gpu: FakeRig) -> None:
    """What is with the device is waited for and counted; the rest is left out."""
    _, session, _ = await _warm(gpu)
    copy = session.start(runs((0, 0, SIZE)))
    copy.cancel()
    moved = await copy.wait()
    assert (moved.nbytes, moved.cancelled) == (MIB, True)
    assert gpu.device.launches == [MIB]
    await session.close()
