"""The gather/scatter kernel, and the only place of kvd that imports torch and Triton.

One launch copies a whole list of runs. A program is one lane of one run: it copies every `lanes`-th
tile of 16 KiB, by loads and stores of 16 bytes with eight in flight a thread.

    run 0  |tile 0|tile 1|tile 2|tile 3|tile 4|    lanes = 2: lane 0 takes tiles 0, 2, 4
    run 1  |tile 0|tile|

Runs are offsets into regions. Where their pieces lie is looked up here, once a tile: on the host that
would take longer than the copy.
"""

import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import Place
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.types import MemoryKind

_TILE: Final = 16 << 10
"""Bytes."""
_WARPS: Final = 4
_MOST_LANES: Final = 64
_RUNS: Final = 1 << 14
"""That a table has room for, at first."""


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed here, and reads annotations as its own
def _find(pieces, offset, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where an offset lies, and the bytes that follow it in the same piece."""
    piece = 0
    step = WIDTH // 2
    while step > 0:
        if tl.load(pieces + piece + step) <= offset:
            piece += step
        step = step // 2
    address = tl.load(pieces + WIDTH + piece) + offset - tl.load(pieces + piece)
    return address, tl.load(pieces + piece + 1) - offset


@triton.jit(do_not_specialize=["runs", "lanes"])  # type: ignore[untyped-decorator]
def _copy_runs(  # type: ignore[no-untyped-def]
    table,
    src_pieces,
    dst_pieces,
    runs,
    lanes,
    TILE: tl.constexpr,
    SRC_WIDTH: tl.constexpr,
    DST_WIDTH: tl.constexpr,
):
    # Lanes of a run run side by side: what is touched at a time lies close together.
    run = tl.program_id(0) // lanes
    src_at = tl.load(table + run)
    dst_at = tl.load(table + runs + run)
    nbytes = tl.load(table + 2 * runs + run)
    tile = (tl.program_id(0) % lanes).to(tl.int64) * TILE
    while tile < nbytes:
        at = tile
        end = tl.minimum(tile + TILE, nbytes)
        while at < end:  # once, but for a tile over the border of two pieces
            src, src_room = _find(src_pieces, src_at + at, SRC_WIDTH)
            dst, dst_room = _find(dst_pieces, dst_at + at, DST_WIDTH)
            here = tl.minimum(end - at, tl.minimum(src_room, dst_room))
            # What parts.ALIGNMENT promises: without it every thread would load 4 bytes at a time.
            words = tl.multiple_of((here // 4).to(tl.int32), 4)
            src_words = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), 16)
            dst_words = tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), 16)
            index = tl.arange(0, TILE // 4)
            inside = index < words
            value = tl.load(src_words + index, mask=inside)
            tl.store(dst_words + index, value, mask=inside)
            at += here
        tile += lanes.to(tl.int64) * TILE


def built_for() -> tuple[MemoryKind, str]:
    """The kind of device that torch was built for, and the version of its runtime.

    Raises:
        DeviceFailed: for none, or none is there.
    """
    if not torch.cuda.is_available():
        raise DeviceFailed("torch sees no device")
    if torch.version.hip is not None:
        return MemoryKind.ROCM, torch.version.hip
    return MemoryKind.CUDA, torch.version.cuda


class Table:
    """Where the runs of one launch are written: in pinned memory, and on the device."""

    def __init__(self, runs: int, device: Any) -> None:
        self.room = runs
        """For how many."""
        self.host = torch.empty(3 * runs, dtype=torch.int64, pin_memory=True)
        self.words = self.host.numpy()
        self.device = torch.empty(3 * runs, dtype=torch.int64, device=device)
        self.addresses = self.device.data_ptr(), self.host.data_ptr()


class Gatherer:
    """Launches on one stream of one device; called by one thread."""

    def __init__(self, index: int, stream: int, copy: Callable[[int, int, int, int], None]) -> None:
        """`copy`: destination, source, bytes, stream."""
        self._device = torch.device("cuda", index)  # HIP's too are called so
        self._stream = stream
        self._copy = copy
        self._spare: list[Table] = []
        self._pieces: weakref.WeakKeyDictionary[Place, Any] = weakref.WeakKeyDictionary()
        self._compiled: dict[tuple[int, int], Any] = {}
        """By the widths of the tables of pieces."""

    def launch(self, runs: Runs, src: Place, dst: Place) -> Table:
        """Begins; give the table back by `over` once it is done.

        Raises:
            DeviceFailed: it cannot.
        """
        count = len(runs)
        try:
            table = self._spare.pop() if self._spare else Table(_RUNS, self._device)
            if table.room < count:
                table = Table(1 << (count - 1).bit_length(), self._device)
            for row, column in enumerate((runs.src, runs.dst, runs.length)):
                table.words[row * count : (row + 1) * count] = column.view(np.int64)  # without a conversion
            self._copy(*table.addresses, 3 * 8 * count, self._stream)
            lanes = min(_MOST_LANES, max(1, -(-runs.total // (count * _TILE))))
            self._launch(table, self._table_of(src), self._table_of(dst), count, lanes)
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error
        return table

    def over(self, table: Table) -> None:
        """The launch with this table is done."""
        self._spare.append(table)

    def _launch(self, table: Table, ours: Any, theirs: Any, count: int, lanes: int) -> None:
        widths = ours.shape[1], theirs.shape[1]
        compiled = self._compiled.get(widths)
        if compiled is None:
            with torch.cuda.stream(torch.cuda.ExternalStream(self._stream, self._device)):
                self._compiled[widths] = _copy_runs[(count * lanes,)](
                    table.device, ours, theirs, count, lanes, _TILE, *widths, num_warps=_WARPS
                )
            return
        # The same without looking all of that up again, which takes as long as copying 64 MiB.
        pointers = table.addresses[0], ours.data_ptr(), theirs.data_ptr()
        compiled[(count * lanes, 1, 1)](*pointers, count, lanes, _TILE, *widths, stream=self._stream)

    def _table_of(self, place: Place) -> Any:
        found = self._pieces.get(place)
        if found is None:
            table = torch.from_numpy(np.ascontiguousarray(place.table()))
            found = self._pieces[place] = table.to(self._device)
        return found
