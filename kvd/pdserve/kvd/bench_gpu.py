"""What a transport of device memory costs: `python -m pdserve.kvd.bench --transport gpu_ipc`.

Two processes: one owns 2 x 8 GiB of device memory in 32 pieces, as an engine of 32 layers does, and this one opens
them by their handles. 1 GiB in scattered blocks over all layers goes through the daemon's own plan, session and device
thread, by each way to copy, against a plain copy of as many bytes by the runtime, also in this process. A device that
was idle is slow at first: each measurement comes right behind a plain copy that is not counted. Repeats are
interleaved, in turned order; the ratio is of medians, of times until the host knows that the bytes are there. They are
the device thread's: what the event loop does before and after, such as checking the runs, is in the waiter's time.

With `--across` the source lies on the first device and the destination on the second, each in a process of its own, and
the plain copy too goes from the one to the other.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from pdserve.kvd.bench_result import Result
from pdserve.kvd.config import GpuCopy
from pdserve.kvd.plan import make_plan
from pdserve.kvd.testing.device_process import DeviceProcess
from pdserve.kvd.testing.engine import plain_layout
from pdserve.kvd.transport.device.gpu import GpuDevices
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.port import MappedRegion, Session
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import ConfigError

_LAYERS: Final = 32
_LAYER: Final = 256 << 20
_MOVED: Final = 1 << 30
_TARGETS: Final = {16: 0.6, 64: 0.8, 256: None}
"""Of a plain copy's speed, by KiB of a run."""
_ACROSS: Final = {16: None, 64: None, 256: None, 1024: None}
"""The same between two devices."""


async def measure(repeats: int, seed: int, *, across: bool = False) -> list[Result]:
    """Every measurement, the ways side by side. `across`: from the first device to the second.

    Raises:
        ConfigError: no device, no second one, one that cannot reach it, or no torch and Triton.
    """
    GpuDevices(GpuCopy.KERNEL)  # says what is missing before a process is started that would miss it too
    ends = (0, 1) if across else (0, 0)
    _seen(max(ends))
    targets: Mapping[int, float | None] = _ACROSS if across else _TARGETS
    with contextlib.ExitStack() as stack:
        owners = {device: stack.enter_context(DeviceProcess(device)) for device in dict.fromkeys(ends)}
        memory = [
            await asyncio.to_thread(owners[device].make, [_LAYER] * _LAYERS, seed + rank)
            for rank, device in enumerate(ends)
        ]
        target = owners[ends[1]]
        before = target.free_memory()
        sessions: dict[GpuCopy, Session] = {}
        transports: list[GpuIpcTransport] = []
        used: list[int] = []
        for way in GpuCopy:
            devices = GpuDevices(way)
            transport = GpuIpcTransport(devices)
            transports.append(transport)
            regions = []
            for rank, owned in enumerate(memory):
                regions.append(MappedRegion(RegionKey("bench", rank), devices.kind, owned.size, 0))
                await transport.take(regions[-1], owned.memory)
            sessions[way] = await transport.open(regions[0], regions[1])
            used.append(before - target.free_memory())
        results: list[Result] = []
        plain = _Plain(*ends)  # behind the last look at what kvd uses of the device
        for kib, wanted in targets.items():
            results += await _scattered(plain, sessions, kib << 10, repeats, seed, wanted)
        results.append(
            Result(
                "device memory of kvd", used[0] / (1 << 20), "MiB", None, True, "with two regions and a session open"
            )
        )
        for session in sessions.values():
            await session.close()
        for transport in transports:
            await transport.aclose()
    return results


def _seen(device: int) -> None:
    from pdserve.kvd.transport.device.kernel import built_for  # torch and Triton

    if (count := Runtime(*built_for()).count()) <= device:
        raise ConfigError(f"--across needs {device + 1} devices; this process sees {count}")


class _Plain:
    """The runtime's own copy, contiguous, in this process."""

    def __init__(self, source: int, target: int) -> None:
        """By numbers of devices. Raises ConfigError."""
        from pdserve.kvd.transport.device.kernel import built_for  # torch and Triton

        self._runtime = Runtime(*built_for())
        try:
            self._runtime.use(source)
            self._source = self._runtime.allocate(_MOVED)
            if source != target:
                self._runtime.reach(target)
            self._runtime.use(target)
            self._target = self._runtime.allocate(_MOVED)
            if source != target:
                self._runtime.reach(source)
            self._stream = self._runtime.make_stream()
            self._event = self._runtime.make_event(shared=False)
        except DeviceFailed as error:
            raise ConfigError(f"devices {source} and {target}: {error}") from error

    def seconds(self) -> float:
        """Of one copy."""
        began = time.perf_counter()
        self._runtime.copy(self._target, self._source, _MOVED, self._stream)
        self._runtime.record(self._event, self._stream)
        while not self._runtime.passed(self._event):  # the best that a host can do
            pass
        return time.perf_counter() - began


async def _scattered(
    plain: _Plain,
    sessions: dict[GpuCopy, Session],
    block_bytes: int,
    repeats: int,
    seed: int,
    target: float | None,
) -> list[Result]:
    random = np.random.default_rng(seed)
    layout = plain_layout(_LAYER // block_bytes, layers=_LAYERS, block_bytes=block_bytes)
    count = _MOVED // block_bytes // _LAYERS
    contiguous: list[float] = []
    moving: dict[GpuCopy, list[float]] = {way: [] for way in sessions}
    whole: dict[GpuCopy, list[float]] = {way: [] for way in sessions}
    for number in range(repeats + 1):  # the first is not counted
        src, dst = (random.permutation(layout.num_blocks)[:count].tolist() for _ in range(2))
        runs = make_plan(layout, layout, range(_LAYERS), src, dst)
        for way in [*sessions, None][:: -1 if number % 2 else 1]:
            plain.seconds()
            if way is None:
                contiguous.append(plain.seconds())
                continue
            began = time.perf_counter()
            moved = await sessions[way].start(runs).wait()
            whole[way].append(time.perf_counter() - began)
            moving[way].append(moved.ns / 1e9)
    fast = statistics.median(contiguous[1:])
    results = []
    for way in sessions:
        took, waited = statistics.median(moving[way][1:]), statistics.median(whole[way][1:])
        ratio = fast / took
        wanted = target if way is GpuCopy.KERNEL else None
        detail = (
            f"{took * 1e3:.2f} ms ({_MOVED / took / 1e9:.0f} GB/s), plain {fast * 1e3:.2f} ms "
            f"({_MOVED / fast / 1e9:.0f} GB/s), from start to the waiter {waited * 1e3:.2f} ms, {repeats} repeats"
        )
        name = f"{way.value} {block_bytes >> 10} KiB"
        results.append(Result(name, ratio, "of plain", wanted, wanted is None or ratio >= wanted, detail))
    return results
