"""Other ways to bring kvd's kernel to the device, to be measured beside its own by `gpu_variants`.

`Bare` launches the compiled kernel with as few steps of the interpreter as can be: every call of the runtime is bound
once with its types, and the kernel's arguments lie in memory that the driver reads. What it does is what
`transport/device/{gpu,kernel}.py` do.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from pdserve.kvd.runs import Repeated, Runs, once
from pdserve.kvd.transport.device import kernel
from pdserve.kvd.transport.device.gpu import GpuDevice
from pdserve.kvd.transport.device.parts import Place, batches
from pdserve.kvd.transport.device.port import DeviceFailed, Launch
from pdserve.kvd.transport.device.runtime import Runtime

MIB: Final = 1 << 20
_BATCH: Final = 512 * MIB
_ROOM: Final = 1 << 17
"""Runs of a table."""
_NOT_READY: Final = 600
_HOST_TO_DEVICE: Final = 1

Schedule = Callable[[Runs], Iterator[Runs]]


def as_it_is(runs: Runs) -> Iterator[Runs]:
    """kvd's own batches."""
    return batches(runs, _BATCH)


def as_a_list(runs: Runs) -> Iterator[Runs]:
    """The same as lists, not as a pattern."""
    return batches(Runs(runs.src, runs.dst, runs.length), _BATCH)


def growing(first: int, factor: int) -> Schedule:
    """Batches of whole patterns: `first` bytes or one place, and each `factor` times the last one, up to 1 GiB."""

    def cut(runs: Runs) -> Iterator[Runs]:
        whole, low, limit = once(runs), 0, first
        while low < len(whole.src_at):
            high = low + max(1, limit // whole.pattern.total)
            yield Repeated(whole.pattern, whole.src_at[low:high], whole.dst_at[low:high])
            low, limit = high, min(2 * _BATCH, limit * factor)

    return cut


class _Slot:
    """A table and an event, which one launch at a time has."""

    def __init__(self, device: Any, runtime: Runtime) -> None:
        self.host = torch.empty(3 * _ROOM, dtype=torch.int64, pin_memory=True)
        self.words = self.host.numpy().view(np.uint64)
        self.there = torch.empty(3 * _ROOM, dtype=torch.int64, device=device)
        self.event = runtime.make_event(shared=False)
        self.copied = runtime.make_event(shared=False)


class Bare:
    """See the module; one device, two places, launches in order."""

    def __init__(self, runtime: Runtime, index: int, compiled: Any, src: Place, dst: Place, read_over: int) -> None:
        """`compiled`: the kernel, for tables of these places' widths. `read_over`: runs of a first table, at most, that
        the kernel reads from the host's memory."""
        device = torch.device("cuda", index)
        self._read_over = read_over
        self._stream, self._tables = runtime.make_stream(), runtime.make_stream()
        self._slots = [_Slot(device, runtime) for _ in range(4)]
        self._next = itertools.cycle(self._slots)
        self._flying = 0
        self._pieces = [torch.from_numpy(np.ascontiguousarray(place.table())).to(device) for place in (src, dst)]
        cuda, driver = ctypes.CDLL(runtime._library._name), ctypes.CDLL(runtime._driver._name)
        void, number, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._copy = _bound(cuda.cudaMemcpyAsync, void, void, number, ctypes.c_int, void)
        self._record = _bound(cuda.cudaEventRecord, void, void)
        self._follow = _bound(cuda.cudaStreamWaitEvent, void, void, flag)
        self._query = _bound(cuda.cudaEventQuery, void)
        self._launch = _bound(driver.cuLaunchKernel, void, *(flag,) * 7, void, void, void)
        self._function, self._threads = compiled.function, 32 * compiled.metadata.num_warps
        # Triton passes scratch memory, of which this kernel needs none, behind what is not constant.
        if compiled.metadata.shared > 48 << 10 or compiled.metadata.global_scratch_size:
            raise DeviceFailed("the kernel needs more than its arguments")
        self._values = [ctypes.c_uint64() for _ in range(3)], [ctypes.c_int32() for _ in range(3)]
        self._scratch = [ctypes.c_uint64(0) for _ in range(2)]
        for value, pieces in zip(self._values[0][1:], self._pieces, strict=True):
            value.value = pieces.data_ptr()
        everything = [*self._values[0], *self._values[1], *self._scratch]
        self._arguments = (ctypes.c_void_p * len(everything))(*map(ctypes.addressof, everything))
        self._at = ctypes.addressof(self._arguments)
        self._shared = compiled.metadata.shared

    def launch(self, runs: Runs, src: Place, dst: Place) -> "BareLaunch":
        """See port.Device; the places are those that it was made with."""
        slot, whole = next(self._next), once(runs)
        pattern, places = whole.pattern, len(whole.src_at)
        count, words = len(pattern), 3 * len(pattern) + 2 * places
        columns = pattern.src, pattern.dst, pattern.length, whole.src_at, whole.dst_at
        np.concatenate(columns, out=slot.words[:words])
        units, lanes = count * places, max(1, -(-int(pattern.length[0]) // kernel._TILE))
        table = slot.there.data_ptr()
        if self._flying:
            _check(self._copy(table, slot.host.data_ptr(), 8 * words, _HOST_TO_DEVICE, self._tables))
            _check(self._record(slot.copied, self._tables))
            _check(self._follow(self._stream, slot.copied, 0))
        elif units > self._read_over:
            _check(self._copy(table, slot.host.data_ptr(), 8 * words, _HOST_TO_DEVICE, self._stream))
        else:
            table, lanes = slot.host.data_ptr(), min(lanes, max(1, kernel._READERS // units))
        (first, _, _), numbers = self._values
        first.value = table
        for value, number in zip(numbers, (count, places, lanes), strict=True):
            value.value = number
        grid, block = (units * lanes, 1, 1), (self._threads, 1, 1)
        _check(self._launch(self._function, *grid, *block, self._shared, self._stream, self._at, None))
        _check(self._record(slot.event, self._stream))
        self._flying += 1
        return BareLaunch(self, slot.event)

    def wait(self, event: int) -> None:
        """Spins until a launch is done."""
        while (code := self._query(event)) == _NOT_READY:
            pass
        _check(code)
        self._flying -= 1


@dataclass(frozen=True)
class BareLaunch:
    """See port.Launch."""

    device: Bare
    event: int

    def wait(self) -> None:
        """See port.Launch."""
        self.device.wait(self.event)


def _bound(function: Any, *types: Any) -> Any:
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def _check(code: int) -> None:
    if code:
        raise DeviceFailed(f"error {code}")


@dataclass(frozen=True)
class Path:
    """One way to bring a copy's batches to the device."""

    name: str
    launch: Callable[[Runs, Place, Place], Launch]
    schedule: Schedule


def paths(device: GpuDevice, bare: Callable[[int], Bare]) -> list[Path]:
    """All of them. `bare`: makes one, by what it reads over the bus."""
    own, over, copied = device.launch, bare(kernel._READ_OVER).launch, bare(0).launch
    everything = bare(_ROOM).launch
    return [
        Path("as it is", own, as_it_is),
        Path("as it is, again", own, as_it_is),
        Path("as a list", own, as_a_list),
        Path("128 MiB first, then fourfold", own, growing(128 * MIB, 4)),
        Path("one launch", own, growing(1024 * MIB, 1)),
        Path("bare", over, as_it_is),
        Path("bare, first table copied", copied, as_it_is),
        Path("bare, first table read over", everything, as_it_is),
        Path("bare, 64 MiB first, then fourfold", over, growing(64 * MIB, 4)),
        Path("bare, 128 MiB first, then fourfold", over, growing(128 * MIB, 4)),
        Path("bare, one launch", over, growing(1024 * MIB, 1)),
    ]
