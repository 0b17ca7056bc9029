"""An engine's KV on an accelerator, as kvd is given it. The accelerator is fake; torch and vLLM are only imported."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.vllm.layout import TensorShape
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.startup import StartReport
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.notices import LayerReady, Notice, StepBegin, StepEnd
from pdserve.kvd.testing import RunningKvd, plain_layout, running_kvd
from pdserve.kvd.testing.device import FakeDeviceMemory, FakeGpus
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError, EngineDied

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

BLOCKS, HEADS, TOKENS, HEAD = 19, 2, 4, 8
SHAPE = (BLOCKS, HEADS, TOKENS, 2 * HEAD)
STRIDE = (HEADS * TOKENS * 2 * HEAD, TOKENS * 2 * HEAD, 2 * HEAD, 1)
BYTES = 2 * BLOCKS * HEADS * TOKENS * 2 * HEAD


class Tensor:
    """What is read of a tensor: where it and its storage lie."""

    def __init__(self, storage: int, skip: int = 0, size: int = BYTES, device: str = "cuda", index: int = 0) -> None:
        self.device = SimpleNamespace(type=device, index=index)
        self.shape = SHAPE
        self._at = storage + skip
        self._storage = SimpleNamespace(data_ptr=lambda: storage, nbytes=lambda: size)

    def data_ptr(self) -> int:
        return self._at

    def stride(self) -> tuple[int, ...]:
        return STRIDE

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> Any:
        return self._storage


class Exported:
    """Takes down what it is asked."""

    def __init__(self, memory: DeviceMemory, done: list[object]) -> None:
        self.memory = memory
        self.done = done
        self.broken = False

    def record(self, step: int, layer: int | None, stream: int) -> None:
        if self.broken:
            raise DeviceFailed("an illegal memory access was encountered")
        self.done.append((step, layer, stream))

    def close(self) -> None:
        self.done.append("closed")


class Notices:
    """Takes everything, into the same list."""

    def __init__(self, done: list[object]) -> None:
        self.done = done

    def send(self, notice: Notice) -> bool:
        self.done.append(notice)
        return True


def memory(done: list[object]) -> tuple[Any, list[Any], Exported]:
    """A DeviceKvMemory, what it exported, and the export that it was given."""
    from pdserve.engine.vllm.device_memory import DeviceKvMemory

    asked: list[Any] = []
    exported = Exported(DeviceMemory("0000:1b:00.0", ()), done)

    def export(kind: MemoryKind, device: int, pieces: Sequence[tuple[int, int]], layers: int) -> Exported:
        asked.append((kind, device, list(pieces), layers))
        return exported

    return DeviceKvMemory(MemoryKind.CUDA, export, lambda: 77), asked, exported


def test_storages_lie_one_behind_the_other_in_the_region() -> None:
    """Each storage once, however many layers lie in it, and each layer at its offset in that."""
    owned, asked, exported = memory([])
    tensors = {"a": Tensor(0x9000_0000), "b": Tensor(0x1000_0000, BYTES, 2 * BYTES), "c": Tensor(0x1000_0000)}
    shapes = owned.shapes(tensors)
    assert [shapes[name].offset for name in tensors] == [0, 2 * BYTES, BYTES]
    assert shapes["a"] == TensorShape(SHAPE, STRIDE, 2, 0)
    assert owned.size == 3 * BYTES
    given = owned.give(plain_layout(4, layers=3))
    assert asked == [(MemoryKind.CUDA, 0, [(0x9000_0000, BYTES), (0x1000_0000, 2 * BYTES)], 3)]
    assert (given.fd, given.size, given.kind, given.device) == (-1, 3 * BYTES, MemoryKind.CUDA, exported.memory)


@pytest.mark.parametrize("other", [Tensor(0x1000, device="cpu"), Tensor(0x1000, index=1)])
def test_tensors_elsewhere_are_refused(other: Tensor) -> None:
    """In host memory, or on another device than the first: kvd would be told a wrong place."""
    owned, _, _ = memory([])
    with pytest.raises(ConfigError, match="the KV cache of b"):
        owned.shapes({"a": Tensor(0x9000), "b": other})


def test_a_layer_is_marked_on_the_stream_before_it_is_told_of() -> None:
    """kvd looks at the mark when the notice comes: one that is set later would be passed already."""
    done: list[object] = []
    owned, _, _ = memory(done)
    owned.give(plain_layout(4))
    sink = owned.marking(Notices(done))
    told: list[Notice] = [StepBegin("e", 0, 5, ()), LayerReady("e", 0, 5, 0), LayerReady("e", 0, 5, 1)]
    told.append(StepEnd("e", 0, 5))
    assert all(sink.send(notice) for notice in told)
    assert done == [told[0], (5, 0, 77), told[1], (5, 1, 77), told[2], (5, None, 77), told[3]]


def test_a_device_that_fails_ends_the_engine_and_tells_of_no_layer() -> None:
    """A layer that was not marked might be read before it is there."""
    done: list[object] = []
    owned, _, exported = memory(done)
    owned.give(plain_layout(4))
    exported.broken = True
    with pytest.raises(EngineDied, match="illegal memory access"):
        owned.marking(Notices(done)).send(LayerReady("e", 0, 5, 0))
    assert done == []


def test_closing_lets_go_of_the_events() -> None:
    """And needs none that was never made."""
    done: list[object] = []
    owned, _, _ = memory(done)
    owned.close()
    owned.give(plain_layout(4))
    owned.close()
    assert done == ["closed"]


# -- the worker's half, at a real daemon ---------------------------------------------------------


@pytest.fixture
def gpus() -> FakeGpus:
    """The accelerators."""
    return FakeGpus()


@pytest.fixture
async def kvd(gpus: FakeGpus) -> AsyncIterator[RunningKvd]:
    """A real daemon on them."""

    def make(config: KvdConfig, arena: Arena) -> tuple[Transport, ...]:
        return ShmTransport(arena), GpuIpcTransport(gpus)

    async with running_kvd(transports=make) as running:
        yield running


def register(socket: str, report: Path, exported: DeviceMemory) -> Any:
    """A rank of two layers registers as vLLM has it do; blocks."""
    from pdserve.engine.vllm.device_memory import DeviceKvMemory
    from pdserve.engine.vllm.worker_side import WorkerSide

    side = WorkerSide(ConnectorOptions("engine", socket, 1, {}, str(report), "cuda"), 0, BLOCKS, TOKENS)
    side.memory = DeviceKvMemory(MemoryKind.CUDA, lambda *_: Exported(exported, []), lambda: 0)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    names = ("model.layers.0.attn", "model.layers.1.attn")
    model = SimpleNamespace(
        use_mla=False,
        get_num_kv_heads=lambda parallel: HEADS,
        get_total_num_kv_heads=lambda: HEADS,
        get_head_size=lambda: HEAD,
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    try:
        side.register({name: Tensor((1 + index) << 20) for index, name in enumerate(names)}, config)
    except BaseException:
        side.close()
        raise
    return side


async def test_a_rank_on_a_device_registers_by_the_path_of_host_memory(
    kvd: RunningKvd, gpus: FakeGpus, tmp_path: Path
) -> None:
    """kvd maps each storage, the service learns the rank's facts, and the rank's end unmaps."""
    owned = FakeDeviceMemory(gpus, [BYTES, BYTES], 1, layers=2)
    side = await asyncio.to_thread(register, kvd.socket, tmp_path, owned.memory)
    try:
        region = kvd.node.mapped[RegionKey("engine", 0)]
        assert (region.kind, region.size) == (MemoryKind.CUDA, 2 * BYTES)
        assert [facts.num_blocks for facts in StartReport(str(tmp_path)).read()] == [BLOCKS]
    finally:
        await asyncio.to_thread(side.close)
    await kvd.node.until(lambda: not kvd.node.mapped, 5.0)


async def test_a_kvd_without_the_device_is_a_configuration_error(
    kvd: RunningKvd, gpus: FakeGpus, tmp_path: Path
) -> None:
    """The device is not among those that kvd sees: the engine does not start, and the message says which."""
    owned = FakeDeviceMemory(gpus, [BYTES, BYTES], 1)
    elsewhere = DeviceMemory("0000:ff:00.0", owned.memory.pieces)
    with pytest.raises(ConfigError, match=r"cuda memory.*no device 0000:ff:00\.0"):
        await asyncio.to_thread(register, kvd.socket, tmp_path, elsewhere)


async def test_a_kvd_that_maps_host_memory_only_is_one_too(gpus: FakeGpus, tmp_path: Path) -> None:
    """Also where nobody asked it before; the message says what to start it with."""
    owned = FakeDeviceMemory(gpus, [BYTES, BYTES], 1)
    async with running_kvd() as plain:
        with pytest.raises(ConfigError, match="--transport gpu_ipc"):
            await asyncio.to_thread(register, plain.socket, tmp_path, owned.memory)


async def test_kvd_is_asked_before_the_engine_starts(kvd: RunningKvd) -> None:
    """From a process of its own. One with gpu_ipc will do, one without is refused before a model is loaded; host
    memory is asked of nobody."""
    from pdserve.engine.vllm import kvd_check

    await asyncio.to_thread(kvd_check.check, kvd.socket, MemoryKind.CUDA)
    async with running_kvd() as plain:
        with pytest.raises(ConfigError, match=r"cuda memory.*runs shm.*--transport gpu_ipc"):
            await asyncio.to_thread(kvd_check.check, plain.socket, MemoryKind.CUDA)
        kvd_check.check("/nowhere", MemoryKind.HOST)
