"""The gpu_ipc transport on a fake accelerator: the suite, and what only a fake can be made to do."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from pdserve.kvd.client import Accept, Begin, Memory, Offer, Outcome, RegionClient
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.notices import Chunk, LayerReady, StepBegin
from pdserve.kvd.testing import FakeEngine, RunningKvd, plain_layout, running_kvd
from pdserve.kvd.testing.device import BUS_ID, FakeDeviceMemory, FakeGpus
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import DeviceMemory, MemoryKind, Mode, RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed
from tests.contract.kvd.gpu_fake import OTHER_BUS, FakeRig, fake_rig
from tests.contract.kvd.gpu_suite import *  # noqa: F403
from tests.contract.kvd.gpu_suite import MIB, OTHERS, PIECES, SIZE, applied, runs, scattered

LAYERS = 2


@pytest.fixture
async def gpu() -> AsyncIterator[FakeRig]:
    """All on one device."""
    async with fake_rig() as rig:
        yield rig


async def test_a_device_that_lies_is_caught_by_the_suite(gpu: FakeRig) -> None:
    """Negative control: a device that copies nothing fails the comparison of the suite."""
    pair = await gpu.pair()
    gpu.device.lie = True
    plan = scattered(5, 4096, 100)
    expected = applied(pair, plan)
    session = await gpu.transport.open(pair.a, pair.b)
    assert (await session.start(plan).wait()).nbytes == plan.total
    assert not (pair.dst.bytes() == expected).all()
    await session.close()


async def test_a_copy_goes_in_batches_and_cancelling_leaves_out_the_rest(gpu: FakeRig) -> None:
    """Of a run of more than four batches of 1 MiB, those that were with the device when it was cancelled are moved."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    before, source = pair.dst.bytes(), pair.src.bytes()
    copy = session.start(runs((0, 0, SIZE)))
    gpu.device.before = lambda _: copy.cancel() if len(gpu.device.launches) == 2 else None
    moved = await copy.wait()
    assert gpu.device.launches == [MIB] * 3
    assert (moved.nbytes, moved.cancelled) == (3 * MIB, True)
    assert (pair.dst.bytes()[: 3 * MIB] == source[: 3 * MIB]).all()
    assert (pair.dst.bytes()[3 * MIB :] == before[3 * MIB :]).all()
    await session.close()


async def test_a_launch_that_fails_fails_its_copy_and_waits_for_the_rest(gpu: FakeRig) -> None:
    """The third of five batches cannot be launched: TransferFailed with the device's words, once the two before it are
    over; the session's next copy is a good one."""
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)

    def third_fails(_: object) -> None:
        if len(gpu.device.launches) == 2:
            raise DeviceFailed("out of memory")

    gpu.device.before = third_fails
    with pytest.raises(TransferFailed, match="out of memory"):
        await session.start(runs((0, 0, SIZE))).wait()
    assert (pair.dst.bytes()[: 2 * MIB] == pair.src.bytes()[: 2 * MIB]).all()
    gpu.device.before = None
    assert (await session.start(runs((0, 0, SIZE))).wait()).nbytes == SIZE
    await session.close()


# -- layers that are not computed yet ------------------------------------------------------------


async def _announcing(gpu: FakeRig) -> tuple[FakeDeviceMemory, FakeDeviceMemory]:
    """Source and destination, whose source has events for two layers, none passed."""
    src = FakeDeviceMemory(gpu.gpus, PIECES, 1, layers=LAYERS)
    dst = FakeDeviceMemory(gpu.gpus, OTHERS, 2)
    for event in src.events:
        event.passed = False
    await gpu.take(0, src)
    await gpu.take(1, dst)
    return src, dst


@pytest.mark.parametrize("layer", [0, 1, None])
@pytest.mark.parametrize("step", [6, 7])
async def test_a_layer_is_read_only_after_it_was_computed(gpu: FakeRig, step: int, layer: int | None) -> None:
    """Announced while the device computes: nothing is launched before its own event is passed, of the other step or
    another layer; what is read is what the device computed last."""
    src, dst = await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    gpu.transport.announced(RegionKey("e", 0), step, layer)
    copy = session.start(runs((0, 0, 4096)))
    slot = (step % 2) * (LAYERS + 1) + (LAYERS if layer is None else layer)
    for index, event in enumerate(src.events):
        event.passed = index != slot
    await asyncio.sleep(0.02)
    assert gpu.device.launches == []
    computed = np.full(4096, 7, np.uint8)
    next(iter(gpu.gpus.exported.values()))[64 : 64 + 4096] = computed
    src.events[slot].passed = True
    await copy.wait()
    assert (dst.bytes()[:4096] == computed).all()
    await session.close()


async def test_what_was_not_announced_is_not_waited_for(gpu: FakeRig) -> None:
    """An offer says that everything is in memory: without a notice under way its copy begins at once. So does one
    behind an announcement that is computed, or of a layer or rank that does not exist."""
    src, _ = await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    await session.start(runs((0, 0, 4096))).wait()
    gpu.transport.announced(RegionKey("e", 0), 1, LAYERS + 1)
    gpu.transport.announced(RegionKey("e", 0), 1, -1)
    gpu.transport.announced(RegionKey("nobody", 0), 1, 0)
    gpu.transport.announced(RegionKey("e", 1), 1, 0)
    gpu.transport.announced(RegionKey("e", 0), 4, 1)
    src.events[1].passed = True
    await session.start(runs((0, 0, 4096))).wait()
    await session.close()


async def test_a_copy_that_waits_for_a_layer_can_be_cancelled(gpu: FakeRig) -> None:
    """Cancelled, also behind another one that waits: terminal at once, nothing moved, and the one before goes on."""
    src, _ = await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    gpu.transport.announced(RegionKey("e", 0), 0, 0)
    first, second = session.start(runs((0, 0, 4096))), session.start(runs((4096, 4096, 4096)))
    second.cancel()
    moved = await asyncio.wait_for(second.wait(), 5)
    assert (moved.nbytes, moved.cancelled) == (0, True)
    assert gpu.device.launches == []
    src.events[0].passed = True
    assert (await first.wait()).nbytes == 4096
    await session.close()


async def test_order_holds_behind_a_copy_that_waits(gpu: FakeRig) -> None:
    """A copy started before a layer is announced, one after it, and one after the layer is computed: in this order."""
    src, dst = await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    gpu.transport.announced(RegionKey("e", 0), 0, 0)
    first = session.start(runs((0, 0, 4096)))
    cancelled = session.start(runs((4096, 0, 4096)))
    cancelled.cancel()
    await cancelled.wait()
    last = session.start(runs((8192, 0, 4096)))
    src.events[0].passed = True
    await asyncio.gather(first.wait(), last.wait())
    assert (dst.bytes()[:4096] == src.bytes()[8192:12288]).all()
    await session.close()


async def test_a_session_closes_under_a_copy_that_waits_for_ever(gpu: FakeRig) -> None:
    """The engine died in its step: the event never comes, and the fence does not wait for it."""
    await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    gpu.transport.announced(RegionKey("e", 0), 0, None)
    copy = session.start(runs((0, 0, 4096)))
    await asyncio.wait_for(session.close(), 5)
    assert (await copy.wait()).nbytes == 0


async def test_an_event_that_cannot_be_known_fails_the_copy(gpu: FakeRig) -> None:
    """TransferFailed, before and while it is waited for; nothing is read."""
    src, _ = await _announcing(gpu)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    gpu.transport.announced(RegionKey("e", 0), 0, 0)
    copy = session.start(runs((0, 0, 4096)))
    src.events[0].broken = True
    with pytest.raises(TransferFailed, match="gone"):
        await copy.wait()
    with pytest.raises(TransferFailed, match="gone"):
        session.start(runs((0, 0, 4096)))
    assert gpu.device.launches == []
    await session.close()


# -- mapping -------------------------------------------------------------------------------------


async def test_two_regions_in_one_allocation_open_it_once(gpu: FakeRig) -> None:
    """A device opens a handle once: ranks that share an allocation share the mapping, until the last lets go."""
    whole = FakeDeviceMemory(gpu.gpus, PIECES, 1)
    both = DeviceMemory(BUS_ID, whole.memory.pieces * 2)
    await gpu.transport.take(gpu.region(0, 2 * SIZE), both)
    await gpu.take(1, whole)
    assert len(gpu.device.opened) == len(PIECES)
    await gpu.transport.give_back(gpu.region(0, 2 * SIZE))
    assert len(gpu.device.opened) == len(PIECES)
    await gpu.transport.give_back(gpu.region(1))
    assert not gpu.device.opened


async def test_between_two_devices_the_destination_reaches_over(gpu: FakeRig) -> None:
    """The source is mapped on the destination's device for the session, and let go with it."""
    src = FakeDeviceMemory(gpu.gpus, PIECES, 1)
    dst = FakeDeviceMemory(gpu.gpus, OTHERS, 2, bus_id=OTHER_BUS)
    await gpu.take(0, src)
    await gpu.take(1, dst)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    await session.start(runs((0, 0, SIZE))).wait()
    assert (dst.bytes() == src.bytes()).all()
    assert (len(gpu.gpus.find(BUS_ID).launches), len(gpu.gpus.find(OTHER_BUS).opened)) == (0, 6)
    await session.close()
    assert len(gpu.gpus.find(OTHER_BUS).opened) == 3


@pytest.fixture
def gate(gpu: FakeRig) -> Iterator[threading.Event]:
    """Holds the device's thread up in its first `warm_up` until it is set."""
    opened = threading.Event()
    gpu.device.warm_up = lambda _: opened.wait(5)  # type: ignore[assignment,method-assign]
    yield opened
    opened.set()


@pytest.mark.usefixtures("gate")
async def test_a_registration_that_is_given_up_leaves_nothing_mapped(gpu: FakeRig, gate: threading.Event) -> None:
    """Its waiter stops waiting at once; what the device has mapped by then is unmapped when it answers (see `gpu`), and
    the same memory is taken meanwhile."""
    owned = FakeDeviceMemory(gpu.gpus, PIECES, 1, layers=LAYERS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await gpu.take(0, owned)
    gate.set()
    await gpu.take(0, owned)
    await gpu.transport.aclose()
    assert [event.opened for event in owned.events] == [0] * len(owned.events)


async def test_the_same_rank_twice_at_once_is_taken_once(gpu: FakeRig) -> None:
    """Two registrations side by side: one holds, the other is refused and lets go of what it had mapped."""
    owned = FakeDeviceMemory(gpu.gpus, PIECES, 1, layers=LAYERS)
    results = await asyncio.gather(*(gpu.take(0, owned) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results].count(InvalidRequest) == 1
    assert [event.opened for event in owned.events] == [1] * len(owned.events)


# -- through a daemon ----------------------------------------------------------------------------

LAYOUT = plain_layout(16, LAYERS, 4096)
NOTHING = plain_layout(1, 1, 16)


@pytest.fixture
def gpus() -> FakeGpus:
    """The accelerators of a daemon."""
    return FakeGpus()


@pytest.fixture
async def kvd(gpus: FakeGpus) -> AsyncIterator[RunningKvd]:
    """A real daemon on fake accelerators; what its engines leave behind is unmapped."""

    def make(config: KvdConfig, arena: Arena) -> tuple[Transport, ...]:
        return ShmTransport(arena), GpuIpcTransport(gpus)

    async with running_kvd(transports=make) as running:
        yield running
    assert not gpus.find(BUS_ID).opened


def _memory(gpus: FakeGpus, seed: int) -> tuple[FakeDeviceMemory, Memory]:
    owned = FakeDeviceMemory(gpus, [16 * 4096] * LAYERS, seed, layers=LAYERS)
    return owned, Memory(-1, owned.size, LAYOUT, MemoryKind.CUDA, owned.memory)


def _prompt(owned: FakeDeviceMemory, blocks: tuple[int, ...]) -> bytes:
    return owned.bytes().reshape(LAYERS, 16, 4096)[:, list(blocks)].tobytes()


async def test_device_memory_is_handed_over_and_goes_with_its_engine(kvd: RunningKvd, gpus: FakeGpus) -> None:
    """Registered over the memory socket, READ and, behind an event, WRITE; at the rank's end it is unmapped."""
    (p_owned, p_given), (d_owned, d_given) = _memory(gpus, 1), _memory(gpus, 2)
    async with (
        FakeEngine(kvd, layout=NOTHING, give=[p_given]) as p,
        FakeEngine(kvd, layout=NOTHING, give=[d_given]) as d,
    ):
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1, 2, 9), 48, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (4, 5, 6), 0, ticket=p.ticket(tid)))
        end = await d.end_of("d")
        assert (end.outcome, end.facts.transport) == (Outcome.LANDED, "gpu_ipc")
        assert _prompt(d_owned, (4, 5, 6)) == _prompt(p_owned, (1, 2, 9))

        tid, launched = os.urandom(16), len(gpus.find(BUS_ID).launches)
        p_owned.events[LAYERS + 1].passed = False  # of layer 0 in odd steps
        p.scheduler.send(Begin("pw", tid, Mode.WRITE))
        d.scheduler.send(Accept("dw", tid, 0, (7,), 0, peer_locator=p.locator()))
        await kvd.node.until(lambda: bool(kvd.node.transfers.book.transfers), 5.0)
        rank = p.rank[0].notices
        rank.send(StepBegin(p.engine_id, 0, 1, (Chunk("pw", 0, 0, (3,), 1),)))
        rank.send(LayerReady(p.engine_id, 0, 1, 0))
        await kvd.node.until(lambda: bool(kvd.node.transfers.book.ops), 5.0)
        assert len(gpus.find(BUS_ID).launches) == launched
        p_owned.events[LAYERS + 1].passed = True
        rank.send(LayerReady(p.engine_id, 0, 1, 1))
        p.scheduler.send(Offer("pw", tid, 0, (3,), 16, Mode.WRITE))
        assert (await d.end_of("dw")).outcome is Outcome.LANDED
        assert _prompt(d_owned, (7,)) == _prompt(p_owned, (3,))
        p.rank[0].close()
        await kvd.node.until(lambda: len(kvd.node.mapped) == 1, 5.0)
        await kvd.node.until(lambda: len(gpus.find(BUS_ID).opened) == LAYERS, 5.0)
        assert all(event.opened == 0 for event in p_owned.events)


async def test_device_memory_that_kvd_cannot_open_is_refused_by_name(kvd: RunningKvd, gpus: FakeGpus) -> None:
    """On a device that it does not see, of another kind, without a device, or beside another layout: InvalidRequest
    with the reason, and nothing stays mapped."""
    owned, _ = _memory(gpus, 1)
    elsewhere = DeviceMemory("0000:ff:00.0", owned.memory.pieces)
    for given, told in (
        (Memory(-1, owned.size, LAYOUT, MemoryKind.CUDA, elsewhere), "no device"),
        (Memory(-1, owned.size, LAYOUT, MemoryKind.ROCM, owned.memory), "not rocm"),
        (Memory(-1, owned.size, LAYOUT, MemoryKind.CUDA, None), "comes with its device"),
        (Memory(-1, owned.size, plain_layout(17, LAYERS, 4096), MemoryKind.CUDA, owned.memory), "leaves its region"),
        (Memory(-1, owned.size, plain_layout(16, LAYERS, 4096, block_size=0), MemoryKind.CUDA, owned.memory), "token"),
    ):
        client = RegionClient("e", 0, given)
        with pytest.raises(InvalidRequest, match=told):
            await asyncio.to_thread(client.register, str(kvd.config.memory_socket))
        client.close()
        assert not gpus.find(BUS_ID).opened
    assert not kvd.node.mapped
