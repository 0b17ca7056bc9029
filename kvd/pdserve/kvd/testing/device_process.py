"""A process with real device memory, as an engine has it: for tests on hardware and for measurements.

Its memory is opened by another process, since none can open its own.
"""

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.transport.device.export import Exported
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.types import DeviceMemory

_ANSWER_S: Final = 120.0
"""Longest wait for an answer: the first one comes after torch was imported."""
_NOISE: Final = 64 << 20
"""Bytes of noise that differ; longer memory repeats them."""
_LOAD: Final = 1 << 30
_GUARD: Final = 512
"""Bytes before each piece, which a copy must leave alone."""
_PAGE: Final = 2 << 20
"""Allocations are multiples of it, as PyTorch's are."""


class DeviceProcess:
    """`with` starts and ends it. Blocks: not for an event loop that must go on."""

    def __init__(self, device: int = 0) -> None:
        """`device`: which of those that this process sees too."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "DeviceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def make(self, sizes: Sequence[int], seed: int, layers: int = 0) -> "RemoteMemory":
        """Memory of one rank: a piece of each size at the end of an allocation of its own, filled with noise."""
        number, memory = self.call("make", list(sizes), seed, layers)
        return RemoteMemory(self, number, memory, sum(sizes))

    def call(self, name: str, *args: object) -> Any:
        """Raises RuntimeError where it failed there, TimeoutError or EOFError where nothing came back."""
        self._pipe.send((name, args))
        if not self._pipe.poll(_ANSWER_S):
            raise TimeoutError(f"{name}: no answer within {_ANSWER_S:g} s")
        good, answer = self._pipe.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def free_memory(self) -> int:
        """Bytes of the device that nobody uses."""
        free: int = self.call("free_memory")
        return free

    def kill(self) -> None:
        """Ends it at once; safe twice."""
        self._process.kill()
        self._process.join(_ANSWER_S)


class RemoteMemory:
    """One rank's memory in a DeviceProcess."""

    def __init__(self, process: DeviceProcess, number: int, memory: DeviceMemory, size: int) -> None:
        self._process = process
        self._number = number
        self.memory: Final = memory
        self.size: Final = size

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of the region's bytes."""
        return self._read(around=False)

    def around(self) -> NDArray[np.uint8]:
        """A copy of what lies before the pieces in their allocations."""
        return self._read(around=True)

    def compute(self, seed: int, step: int, layer: int | None, gibibytes: int) -> NDArray[np.uint8]:
        """Gives the device work (some copies of 1 GiB, half a millisecond each on an H200), behind that new noise for
        the whole memory, and behind that the event of a layer; returns the noise at once, before it is there."""
        answer: NDArray[np.uint8] = self._process.call("compute", self._number, seed, step, layer, gibibytes)
        return answer

    def _read(self, *, around: bool) -> NDArray[np.uint8]:
        answer: NDArray[np.uint8] = self._process.call("read", self._number, around)
        return answer


class _Owner:
    """The other side."""

    def __init__(self, device: int) -> None:
        from pdserve.kvd.transport.device import kernel  # finds the runtime's library by torch

        self._kind, self._version = kernel.built_for()
        self._runtime = Runtime(self._kind, self._version)
        self._device = device
        self._runtime.use(device)
        self._stream = self._runtime.make_stream()
        self._event = self._runtime.make_event(shared=False)
        self._made: list[tuple[Exported, list[tuple[int, int]]]] = []
        self._load = 0

    def make(self, sizes: list[int], seed: int, layers: int) -> tuple[int, DeviceMemory]:
        random = np.random.default_rng(seed)
        ranges = []
        for size in sizes:
            whole = -(-(size + _GUARD) // _PAGE) * _PAGE
            base = self._runtime.allocate(whole)
            noise = random.integers(0, 256, min(whole, _NOISE), dtype=np.uint8)
            self._copy(base, noise.ctypes.data, noise.nbytes)
            filled = noise.nbytes
            while filled < whole:
                part = min(filled, whole - filled)
                self._copy(base + filled, base, part)
                filled += part
            ranges.append((base + whole - size, size))
        exported = Exported(self._kind, self._version, self._device, ranges, layers)
        self._made.append((exported, ranges))
        return len(self._made) - 1, exported.memory

    def read(self, number: int, around: bool) -> NDArray[np.uint8]:
        parts = []
        for address, size in self._made[number][1]:
            part = np.empty(_GUARD if around else size, np.uint8)
            self._copy(part.ctypes.data, address - _GUARD if around else address, part.nbytes)
            parts.append(part)
        return np.concatenate(parts)

    def compute(self, number: int, seed: int, step: int, layer: int | None, gibibytes: int) -> NDArray[np.uint8]:
        exported, ranges = self._made[number]
        noise = np.random.default_rng(seed).integers(0, 256, sum(size for _, size in ranges), dtype=np.uint8)
        fresh = self._runtime.allocate(noise.nbytes)
        self._copy(fresh, noise.ctypes.data, noise.nbytes)
        self._load = self._load or self._runtime.allocate(2 * _LOAD)
        for _ in range(gibibytes):
            self._runtime.copy(self._load, self._load + _LOAD, _LOAD, self._stream)
        at = 0
        for address, size in ranges:
            self._runtime.copy(address, fresh + at, size, self._stream)
            at += size
        exported.record(step, layer, self._stream)
        return noise

    def free_memory(self) -> int:
        return self._runtime.free_memory()

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self._runtime.copy(dst, src, nbytes, self._stream)
        self._runtime.record(self._event, self._stream)
        self._runtime.wait(self._event)


def _serve(pipe: Connection, device: int) -> None:
    owner: _Owner | None = None
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            owner = owner or _Owner(device)
            pipe.send((True, getattr(owner, name)(*args)))
        except Exception as error:  # noqa: BLE001  # it is raised on the other side
            pipe.send((False, f"{type(error).__name__}: {error}"))
