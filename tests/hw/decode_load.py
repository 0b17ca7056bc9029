"""What transfers cost a decoding engine on the same device: `python -m tests.hw.decode_load`.

One process replays a graph of the matrix products of Qwen3-8B's shape for a batch of 16, step by step, and times each;
another one, as kvd, copies 2,000-token prompts (36 layers, 64 KiB blocks, 295 MB) back to back between two regions of a
third process. Prints p50 and p99 of a step alone and under each way to copy. No vLLM: no attention, no sampling.
"""

import asyncio
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Final

import numpy as np

from pdserve.kvd.config import GpuCopy
from pdserve.kvd.plan import make_plan
from pdserve.kvd.testing import plain_layout
from pdserve.kvd.testing.device_process import DeviceProcess
from pdserve.kvd.transport.device.gpu import GpuDevices
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import RegionKey

_LAYERS: Final = 36
_BLOCK: Final = 64 << 10
_BLOCKS: Final = 2048
_PROMPT: Final = 125
_SHAPES: Final = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
_BATCH: Final = 16


def _decoder(pipe: Connection, stop: Event) -> None:
    """Answers each number with the times of that many steps; 0 with those of steps until `stop` is set."""
    import torch

    weights = [[torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in _SHAPES] for _ in range(_LAYERS)]
    inputs = {s[0]: torch.randn((_BATCH, s[0]), device="cuda", dtype=torch.bfloat16) for s in _SHAPES}

    def step() -> None:
        for layer in weights:
            for weight in layer:
                inputs[weight.shape[0]] @ weight

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pipe.send("ready")
    while (steps := pipe.recv()) is not None:
        took: list[float] = []
        while len(took) < steps or (steps == 0 and not stop.is_set()):
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        pipe.send(took)


def _line(name: str, took: list[float], extra: str = "") -> str:
    took = sorted(took)
    p50, p99, worst = statistics.median(took), took[int(len(took) * 0.99)], took[-1]
    return (
        f"{name:28} p50 {p50 * 1e3:7.3f} ms  p99 {p99 * 1e3:7.3f} ms  "
        f"worst {worst * 1e3:7.3f} ms  {len(took)} steps{extra}"
    )


async def _under(method: GpuCopy, engine: DeviceProcess, pipe: Connection, stop: Event, seconds: float) -> None:
    devices = GpuDevices(method)
    transport = GpuIpcTransport(devices)
    layout = plain_layout(_BLOCKS, _LAYERS, _BLOCK)
    regions = []
    for rank in range(2):
        memory = await asyncio.to_thread(engine.make, [_BLOCKS * _BLOCK] * _LAYERS, rank)
        regions.append(MappedRegion(RegionKey(method.value, rank), devices.kind, memory.size, 0))
        await transport.take(regions[-1], memory.memory)
    session = await transport.open(regions[0], regions[1])
    random = np.random.default_rng(0)
    plans = []
    for _ in range(8):
        src, dst = (random.permutation(_BLOCKS)[:_PROMPT].tolist() for _ in range(2))
        plans.append(make_plan(layout, layout, range(_LAYERS), src, dst))
    alone = [(await session.start(plan).wait()).ns / 1e6 for plan in plans * 4]
    for gap in (0.0, 0.02):
        stop.clear()
        pipe.send(0)
        count, beside, until = 0, [], time.monotonic() + seconds
        while time.monotonic() < until:
            beside.append((await session.start(plans[count % len(plans)]).wait()).ns / 1e6)
            count += 1
            await asyncio.sleep(gap)
        stop.set()
        took = await asyncio.to_thread(pipe.recv)
        extra = (
            f"; {count / seconds:.0f} copies/s, one {statistics.median(beside):.2f} ms, "
            f"alone {statistics.median(alone):.2f} ms"
        )
        print(_line(f"{method.value}, {gap * 1e3:.0f} ms between copies", took, extra), flush=True)
    await session.close()
    await transport.aclose()


def main(seconds: float) -> None:
    """Measures alone before and after, to show the spread."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    stop = context.Event()
    decoder = context.Process(target=_decoder, args=(theirs, stop), daemon=True)
    decoder.start()
    with DeviceProcess() as engine:
        assert pipe.recv() == "ready"
        for round_ in range(2):
            pipe.send(500)
            print(_line("alone", pipe.recv()), flush=True)
            for method in list(GpuCopy)[:: 1 if round_ == 0 else -1]:
                asyncio.run(_under(method, engine, pipe, stop, seconds))
        pipe.send(500)
        print(_line("alone", pipe.recv()), flush=True)
    decoder.kill()
    decoder.join(10)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
