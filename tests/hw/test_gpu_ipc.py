"""The gpu_ipc transport on real accelerators: the suites of the fake one, and what only real ones can show.

pytest tests/hw/test_gpu_ipc.py       (torch and Triton, a CUDA or ROCm device, nothing else on it)

All of it on one device, and, where there are two, also from the one to the other, either way (`-k device-0-to-1`).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pdserve.kvd.client import Accept, Begin, Memory, Offer, Outcome
from pdserve.kvd.config import GpuCopy
from pdserve.kvd.notices import Chunk, LayerReady, StepBegin, StepEnd
from pdserve.kvd.testing import FakeEngine, kvd_process, plain_layout
from pdserve.kvd.testing.device_process import RemoteMemory
from pdserve.kvd.transport.device.gpu import GpuDevices
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.types import MemoryKind, Mode, RegionKey
from tests.contract.kvd.gpu_layouts import *  # noqa: F403
from tests.contract.kvd.gpu_layouts import Daemon
from tests.contract.kvd.gpu_suite import *  # noqa: F403
from tests.contract.kvd.gpu_suite import MIB, OTHERS, PIECES, SIZE, Rig, runs
from tests.hw.engines import PLACES, Engines, devices

pytestmark = [pytest.mark.hw, pytest.mark.timeout(180)]

LAYERS = 4
BLOCKS = 64
LAYOUT = plain_layout(BLOCKS, LAYERS, 64 << 10)


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"device-{place[0]}-to-{place[1]}")
def place(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Devices of sources and destinations."""
    place: tuple[int, int] = request.param
    if (count := devices()) <= max(place):
        pytest.skip(f"this machine has {count} device")
    return place


@pytest.fixture(scope="module")
def engine(place: tuple[int, int]) -> Iterator[Engines]:
    """The processes whose memory it is."""
    with Engines(*place) as processes:
        yield processes


@pytest.fixture(params=list(GpuCopy), ids=lambda method: method.value)
async def gpu(request: pytest.FixtureRequest, engine: Engines) -> AsyncIterator[Rig]:
    """Both ways to copy, between memory of another process. Nothing is fake."""
    devices = GpuDevices(request.param)
    transport = GpuIpcTransport(devices, batch_bytes=MIB)
    yield Rig(transport, engine.make, devices.kind, real=True)
    await transport.aclose()


async def test_memory_lies_where_it_was_asked_for(gpu: Rig, place: tuple[int, int]) -> None:
    """Source and destination are of two devices exactly where the test says so: no other test would tell."""
    pair = await gpu.pair()
    assert (pair.src.memory.bus_id != pair.dst.memory.bus_id) == (place[0] != place[1])


@pytest.mark.parametrize("announced", [True, False])
async def test_a_layer_is_read_only_after_it_was_computed(gpu: Rig, engine: Engines, announced: bool) -> None:
    """The engine's host has run ahead by some 100 ms of device work when the layer is announced: its bytes arrive as
    computed. Not announced, they are read too early (the negative control)."""
    src, dst = engine.make(PIECES, 1, layers=2), engine.make(OTHERS, 2)
    await gpu.take(0, src)
    await gpu.take(1, dst)
    session = await gpu.transport.open(gpu.region(0), gpu.region(1))
    for step in range(4):
        computed = src.compute(seed=10 + step, step=step, layer=1, gibibytes=200)
        if announced:
            gpu.transport.announced(RegionKey("e", 0), step, 1)
        await session.start(runs((0, 0, SIZE))).wait()
        assert bool((dst.bytes() == computed).all()) == announced
        src.bytes()  # the device is idle again
    await session.close()


async def test_an_engine_that_is_killed_holds_nothing_up(gpu: Rig, place: tuple[int, int]) -> None:
    """SIGKILL with copies and an announced layer under way: every copy becomes terminal, the session closes, the memory
    is given back, and another engine's memory is copied after that."""
    with Engines(*place) as victim:
        src, dst = victim.make((256 * MIB,), 1, layers=2), victim.make((256 * MIB,), 2)
        for rank, owned in enumerate((src, dst)):
            await gpu.take(rank, owned)
        session = await gpu.transport.open(gpu.region(0, src.size), gpu.region(1, dst.size))
        copies = [session.start(runs((0, 0, 256 * MIB))) for _ in range(4)]
        src.compute(seed=3, step=0, layer=0, gibibytes=2000)
        gpu.transport.announced(RegionKey("e", 0), 0, 0)
        copies.append(session.start(runs((0, 0, 4096))))
        victim.kill()
        async with asyncio.timeout(20):
            await session.close()
            print(await asyncio.gather(*(copy.wait() for copy in copies), return_exceptions=True))
            for rank in range(2):
                await gpu.transport.give_back(gpu.region(rank))  # by its key
    pair = await gpu.pair()
    session = await gpu.transport.open(pair.a, pair.b)
    await session.start(runs((0, 0, SIZE))).wait()
    assert (pair.dst.bytes() == pair.src.bytes()).all()
    await session.close()


# -- through a daemon ----------------------------------------------------------------------------


@pytest.fixture(params=list(GpuCopy), ids=lambda method: method.value)
async def daemon(request: pytest.FixtureRequest, engine: Engines, tmp_path: Path) -> AsyncIterator[Daemon]:
    """kvd as its own process, and engines' memory in another one."""
    flags = ("--transport", "gpu_ipc", "--gpu-copy", request.param.value)
    async with kvd_process(tmp_path, *flags, within=90) as kvd:
        yield Daemon(kvd, engine.make, GpuDevices(request.param).kind)


def _given(memory: RemoteMemory, kind: MemoryKind) -> Memory:
    return Memory(-1, memory.size, LAYOUT, kind, memory.memory)


def _prompt(memory: RemoteMemory, blocks: tuple[int, ...]) -> bytes:
    whole = memory.bytes().reshape(LAYERS, BLOCKS, -1)
    return whole[:, list(blocks)].tobytes()


@pytest.mark.parametrize("method", list(GpuCopy), ids=lambda method: method.value)
async def test_read_and_write_through_a_daemon(engine: Engines, tmp_path: Path, method: GpuCopy) -> None:
    """kvd as its own process, engines' memory in another one, a piece for each layer: READ, and WRITE whose layers are
    announced before the device has computed them; blocks arrive as they are in the end, others stay."""
    kind = GpuDevices(method).kind
    per_layer = [LAYOUT.layers[0][0].stride * BLOCKS] * LAYERS
    p_memory, d_memory = engine.make(per_layer, 1, layers=LAYERS), engine.make(per_layer, 2)
    flags = ("--transport", "gpu_ipc", "--gpu-copy", method.value)
    async with (
        kvd_process(tmp_path, *flags, within=90) as kvd,
        FakeEngine(kvd, layout=plain_layout(1, 1, 16), seed=1, give=[_given(p_memory, kind)]) as p,
        FakeEngine(kvd, layout=plain_layout(1, 1, 16), seed=2, give=[_given(d_memory, kind)]) as d,
    ):
        others = _prompt(d_memory, (0, 1, 4, 63))
        tid, ours, theirs = os.urandom(16), (3, 5, 60), (2, 3, 62)
        d.scheduler.send(Accept("d", tid, 0, theirs, 0, ticket=p.ticket(tid)))
        p.scheduler.send(Offer("p", tid, 0, ours, 48, Mode.READ))
        end = await d.end_of("d", 20)
        assert (end.outcome, end.facts.transport) == (Outcome.LANDED, "gpu_ipc")
        assert _prompt(d_memory, theirs) == _prompt(p_memory, ours)

        tid = os.urandom(16)
        p.scheduler.send(Begin("pw", tid, Mode.WRITE))
        await asyncio.sleep(0.2)  # a notice that comes before it would be of nobody, and cost the overlap
        d.scheduler.send(Accept("dw", tid, 0, theirs, 0, peer_locator=p.locator()))
        await asyncio.sleep(0.2)
        p.rank[0].notices.send(StepBegin(p.engine_id, 0, 1, (Chunk("pw", 0, 0, ours, 3),)))
        for layer in range(LAYERS):
            # The whole memory is new with each layer: what was read too early differs from the end.
            await asyncio.to_thread(p_memory.compute, 20, 1, layer, 60)
            p.rank[0].notices.send(LayerReady(p.engine_id, 0, 1, layer))
        await asyncio.to_thread(p_memory.compute, 20, 1, None, 1)
        p.rank[0].notices.send(StepEnd(p.engine_id, 0, 1))
        await asyncio.to_thread(p_memory.bytes)  # an engine offers once its host has seen the step's token
        p.scheduler.send(Offer("pw", tid, 0, ours, 48, Mode.WRITE))
        end = await d.end_of("dw", 20)
        assert end.outcome is Outcome.LANDED
        assert end.facts.overlapped_bytes > 0
        assert _prompt(d_memory, theirs) == _prompt(p_memory, ours)
        assert _prompt(d_memory, (0, 1, 4, 63)) == others
