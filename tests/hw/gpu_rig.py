"""What `gpu_variants` measures with: regions of another process, one copy in batches, and a plain copy."""

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from pdserve.kvd.runs import Runs, once
from pdserve.kvd.testing.device_process import RemoteMemory
from pdserve.kvd.transport.device.gpu import GpuDevice
from pdserve.kvd.transport.device.mappings import Mappings
from pdserve.kvd.transport.device.parts import Place, aligned, surely_inside
from pdserve.kvd.transport.device.port import Launch
from pdserve.kvd.transport.device.runtime import Runtime
from tests.hw.gpu_kernels import Work
from tests.hw.gpu_launches import Bare, Path

MOVED: Final = 1 << 30
FLYING: Final = 3
"""Launches with the device, as gpu_ipc has."""


@dataclass
class Bench:
    """Two regions of another process, mapped here."""

    device: GpuDevice
    src: Place
    dst: Place

    @property
    def torch_stream(self) -> Any:
        """kvd's, for torch and Triton."""
        return torch.cuda.ExternalStream(self.device._stream)

    def work(self, plan: Runs) -> Work:
        """One launch's, on the device."""
        places = [torch.from_numpy(np.ascontiguousarray(place.table())).cuda() for place in (self.src, self.dst)]
        whole, here = once(plan), np.zeros(2, np.uint64)
        tables = (
            (plan.src, plan.dst, plan.length, here),
            (self.src.at(plan.src), self.dst.at(plan.dst), plan.length),
            (whole.pattern.src, whole.pattern.dst, whole.pattern.length, whole.src_at, whole.dst_at),
        )
        table, direct, pattern = (torch.from_numpy(np.concatenate(one).view(np.int64)).cuda() for one in tables)
        counts = len(whole.pattern), len(whole.src_at)
        return Work(table, direct, len(plan), plan.total, places[0], places[1], pattern, *counts)

    def bare(self, read_over: int) -> Bare:
        """See gpu_launches. kvd's own kernel has been compiled for these places."""
        gatherer, widths = self.device._gatherer, (self.src.table().shape[1], self.dst.table().shape[1])
        compiled = gatherer._compiled[widths]
        return Bare(self.device._runtime, self.device._index, compiled, self.src, self.dst, read_over)


def mapped(device: GpuDevice, memory: Sequence[RemoteMemory]) -> Bench:
    """The memory of both ends, as the device sees it; kvd's kernel is compiled."""
    src, dst = Mappings(device).map_all([one.memory for one in memory])
    for place in (src, dst):
        device.warm_up(place)
    return Bench(device, src, dst)


def run(path: Path, bench: Bench, plan: Runs) -> tuple[float, float]:
    """One copy as GpuCopy.run makes it; seconds until it is done and until the first launch is given."""
    # As kvd does ahead: it reads all of the plan, so that every way finds it in the processor's cache.
    assert aligned(plan)
    assert surely_inside(plan, bench.src.size, bench.dst.size)
    rest = path.schedule(plan)
    first = next(rest)
    began = time.perf_counter()
    flying: collections.deque[Launch] = collections.deque([path.launch(first, bench.src, bench.dst)])
    given = time.perf_counter()
    for batch in rest:
        flying.append(path.launch(batch, bench.src, bench.dst))
        if len(flying) == FLYING:
            flying.popleft().wait()
    while flying:
        flying.popleft().wait()
    return time.perf_counter() - began, given - began


class Plain:
    """The runtime's own copy, as the benchmark measures it, and by the device's clock."""

    def __init__(self, runtime: Runtime, source: int, target: int, at: int) -> None:
        """Numbers of devices: of what is read, of what is written, and of the one that copies."""
        self._runtime = runtime
        self._at = at
        self._memory = [self._on(device, {source, target} - {device}) for device in (source, target)]
        runtime.use(at)
        self._stream = runtime.make_stream()
        self._event = runtime.make_event(shared=False)

    def seconds(self) -> float:
        """By the host's clock."""
        began = time.perf_counter()
        self._copy(self._stream)
        self._runtime.record(self._event, self._stream)
        while not self._runtime.passed(self._event):
            pass
        return time.perf_counter() - began

    def device_seconds(self) -> float:
        """By the device's clock."""
        return self.timed(self._stream, lambda: self._copy(self._stream))

    def timed(self, stream: int, launch: Callable[[], None]) -> float:
        """Seconds of the device for what `launch` gives it, right behind a plain copy: while that goes on, the host's
        time for the launch passes unseen."""
        on = torch.cuda.ExternalStream(stream, torch.device("cuda", self._at))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(on):
            self._copy(stream)
            begin.record(on)
            launch()
            end.record(on)
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def _copy(self, stream: int) -> None:
        source, target = self._memory
        self._runtime.copy(target, source, MOVED, stream)

    def _on(self, device: int, others: set[int]) -> int:
        self._runtime.use(device)
        for other in others:
            self._runtime.reach(other)
        return self._runtime.allocate(MOVED)
