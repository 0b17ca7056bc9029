"""gpu_ipc between engines whose KV lies in different ways, on fake accelerators: the suite, and what only a fake can be
made to do."""

import os
from collections.abc import AsyncIterator

import pytest

from pdserve.kvd.client import Accept, Begin, Offer, Outcome
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import RunningKvd, running_kvd
from pdserve.kvd.testing.device import BUS_ID, FakeDeviceMemory, FakeGpus
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.types import MemoryKind, Mode
from tests.contract.kvd.gpu_fake import BUSES, PLACES, FakeMakes, FakeRig, all_unmapped, fake_rig
from tests.contract.kvd.gpu_layouts import *  # noqa: F403
from tests.contract.kvd.gpu_layouts import WAIT_S, Daemon, fake_engine, handed_over, known, owned, through
from tests.contract.kvd.gpu_sides import CASES, LAYERS


@pytest.fixture(params=list(PLACES.values()), ids=list(PLACES))
async def gpu(request: pytest.FixtureRequest) -> AsyncIterator[FakeRig]:
    """Source and destination on one device, on two, and with ranks on both."""
    async with fake_rig(*request.param) as rig:
        yield rig


@pytest.fixture
def gpus() -> FakeGpus:
    """The accelerators of a daemon."""
    return FakeGpus(BUSES)


@pytest.fixture
async def kvd(gpus: FakeGpus) -> AsyncIterator[RunningKvd]:
    """A real daemon on fake accelerators; what its engines leave behind is unmapped."""

    def make(config: KvdConfig, arena: Arena) -> tuple[Transport, ...]:
        return (GpuIpcTransport(gpus),)

    async with running_kvd(transports=make) as running:
        yield running
    all_unmapped(gpus)


@pytest.fixture(params=list(PLACES.values()), ids=list(PLACES))
async def daemon(request: pytest.FixtureRequest, kvd: RunningKvd, gpus: FakeGpus) -> Daemon:
    """The same, and memory for its engines."""
    return Daemon(kvd, FakeMakes(gpus, *request.param), MemoryKind.CUDA)


async def test_a_device_that_lies_is_caught_by_the_suite(daemon: Daemon, gpus: FakeGpus) -> None:
    """Negative control: where one device says that it copied and did not, the comparison of the suite fails, though
    every transfer has landed."""
    case = CASES["everything"]
    src, dst = owned(daemon.make, case.src, 1), owned(daemon.make, case.dst, 2)
    gpus.find(dst[1].memory.bus_id).lie = True
    with pytest.raises(AssertionError, match=r"destination rank \d: \d+ bytes are wrong"), handed_over(case, src, dst):
        await through(daemon, case, Mode.READ, src, dst)


async def test_a_rank_is_read_only_after_its_own_device_computed_it(kvd: RunningKvd, gpus: FakeGpus) -> None:
    """Two ranks announce a layer, and rank 0 alone has computed it: its heads are copied, and nothing of rank 1's
    before its event is passed. What arrives is what each computed last."""
    case = CASES["ranks 2 to 1"]
    src = [FakeDeviceMemory(gpus, case.src.pieces, 1 + rank, layers=LAYERS) for rank in range(2)]
    dst = [FakeDeviceMemory(gpus, case.dst.pieces, 7)]
    moved, launches = case.moved // LAYERS // 2, gpus.find(BUS_ID).launches
    daemon = Daemon(kvd, FakeMakes(gpus), MemoryKind.CUDA)
    async with fake_engine(daemon, case.src, src) as p, fake_engine(daemon, case.dst, dst) as d:
        tid = os.urandom(16)
        p.scheduler.send(Begin("p", tid, Mode.WRITE))
        d.scheduler.send(Accept("d", tid, 0, case.theirs, case.first, peer_locator=p.locator()))
        await known(daemon, lambda one: "reserved" in one.consumer_states)
        slot = src[1].memory.slot(1, 0)
        assert slot is not None
        src[1].events[slot].passed = False
        p.step(1, Chunk("p", 0, 0, case.ours, len(case.ours)), layers=[0], end=False)
        await known(daemon, lambda one: one.bytes_moved == moved and one.operations == 1)
        assert sum(launches) == moved
        computed = gpus.exported[src[1].memory.pieces[0].handle]
        computed[64:] = 0x42
        with handed_over(case, src, dst):
            src[1].events[slot].passed = True
            p.step(2, Chunk("p", 0, 0, case.ours, len(case.ours)), layers=range(1, LAYERS))
            p.scheduler.send(Offer("p", tid, 0, case.ours, len(case.ours) * case.src.block_size, Mode.WRITE))
            assert (await d.end_of("d", WAIT_S)).outcome is Outcome.LANDED
