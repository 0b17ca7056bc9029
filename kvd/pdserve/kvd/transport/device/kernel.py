"""The gather/scatter kernel, and the only place of kvd that imports torch and Triton.

One launch copies a whole list of runs, or a pattern of runs to all of its places. A program is one lane of one run at
one place: it copies every `lanes`-th tile of 4 KiB, by loads and stores of 16 bytes with eight in flight a thread.

    run 0  |tile 0|tile 1|tile 2|tile 3|tile 4|    lanes = 2: lane 0 takes tiles 0, 2, 4
    run 1  |tile 0|tile|

A prompt's blocks are the same in each layer: a pattern of some hundred runs and a place for each layer are a table that
a host fills in no time, where the list would have thousands of runs. All are offsets into regions. Where their pieces
lie is looked up here, once a tile: on the host that would take longer than the copy.
"""

import weakref
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from pdserve.kvd.runs import Runs, once
from pdserve.kvd.transport.device.parts import Place
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.types import MemoryKind

_TILE: Final = 4 << 10
"""Bytes."""
_WARPS: Final = 1
_MOST_LANES: Final = 256
_READ_OVER: Final = 1 << 11
"""Runs at places, at most, of which a kernel reads the table in the host's memory. A copy of it to the device costs the
host some 10 µs in which nothing else happens; more reads than these cost the kernel as much."""
_READERS: Final = 1 << 11
"""Programs that share them then: each reads its run over the bus."""
_NO_HOOKS: Final = (None, None, None)
"""Of Triton's launch: its metadata, and what profilers hang in before and after."""
_WORDS: Final = 1 << 16
"""That a table has room for, at first."""
_TABLES: Final = 3
"""Made with the first launch, since later ones would wait for theirs: as many as there are launches at a time."""


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed here, and reads annotations as its own
def _find(pieces, offset, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where an offset lies, and the bytes that follow it in the same piece."""
    begins = tl.load(pieces + tl.arange(0, WIDTH))
    piece = tl.sum((begins <= offset).to(tl.int32)) - 1
    address = tl.load(pieces + WIDTH + piece) + offset - tl.load(pieces + piece)
    return address, tl.load(pieces + piece + 1) - offset


@triton.jit(do_not_specialize=["runs", "places", "lanes"])  # type: ignore[untyped-decorator]
def _copy_runs(  # type: ignore[no-untyped-def]
    table,
    src_pieces,
    dst_pieces,
    runs,
    places,
    lanes,
    TILE: tl.constexpr,
    SRC_WIDTH: tl.constexpr,
    DST_WIDTH: tl.constexpr,
):
    # Lanes of a run run side by side, and runs of a place: what is touched at a time lies close together.
    unit = tl.program_id(0) // lanes
    run = unit % runs
    place = table + 3 * runs + unit // runs
    src_at = tl.load(table + run) + tl.load(place)
    dst_at = tl.load(table + runs + run) + tl.load(place + places)
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
    """What one launch copies: in pinned memory, which the device reads too, and on the device. The runs' sources,
    destinations and lengths, and the places' sources and destinations, one column behind the other."""

    def __init__(self, words: int, device: Any, event: int) -> None:
        """`event`: to be set behind a copy of it to the device."""
        self.room = words
        """For how many."""
        self.event = event
        self._host = torch.empty(words, dtype=torch.int64, pin_memory=True)
        self.device = torch.empty(words, dtype=torch.int64, device=device)
        self.words = self._host.numpy().view(np.uint64)
        self.at = self.device.data_ptr(), self._host.data_ptr()
        """Addresses: on the device, and here."""


class Gatherer:
    """Launches on one stream of one device; called by one thread."""

    def __init__(self, index: int, stream: int, runtime: Runtime) -> None:
        self._device = torch.device("cuda", index)  # HIP's too are called so
        self._stream = stream
        self._runtime = runtime
        self._tables = runtime.make_stream()
        """Carries tables to the device while a kernel runs; in the kernel's stream each would wait for its end, and
        the device for the table."""
        self._flying = 0
        """Launches that are not known to be done."""
        self._spare: list[Table] = []
        self._pieces: weakref.WeakKeyDictionary[Place, tuple[Any, int]] = weakref.WeakKeyDictionary()
        """Each place's table on the device, and its address."""
        self._compiled: dict[tuple[int, int], Any] = {}
        """By the widths of the tables of pieces."""

    def launch(self, runs: Runs, src: Place, dst: Place) -> Table:
        """Begins; give the table back by `over` once it is done.

        Raises:
            DeviceFailed: it cannot.
        """
        whole = once(runs)
        pattern, places = whole.pattern, len(whole.src_at)
        count, words = len(pattern), 3 * len(pattern) + 2 * places
        units = count * places
        try:
            table = self._table(words)
            columns = pattern.src, pattern.dst, pattern.length, whole.src_at, whole.dst_at
            np.concatenate(columns, out=table.words[:words])
            lanes = min(_MOST_LANES, max(1, -(-pattern.total // (count * _TILE))))
            ours, theirs = self._pieces_of(src), self._pieces_of(dst)
            widths = ours[0].shape[1], theirs[0].shape[1]
            compiled = self._compiled.get(widths)
            at, here = table.at
            if self._flying:
                self._runtime.copy(at, here, 8 * words, self._tables)
                self._runtime.record(table.event, self._tables)
                self._runtime.follow(self._stream, table.event)
            elif units > _READ_OVER or compiled is None:
                self._runtime.copy(at, here, 8 * words, self._stream)
            else:
                at, lanes = here, min(lanes, max(1, _READERS // units))
            if compiled is None:
                self._compiled[widths] = self._compile(table.device, ours[0], theirs[0], count, places, lanes)
            else:
                # The same without looking all of that up again, which takes as long as copying 64 MiB.
                compiled.run(
                    *(units * lanes, 1, 1, self._stream, compiled.function, compiled.packed_metadata, *_NO_HOOKS),
                    *(at, ours[1], theirs[1], count, places, lanes, _TILE, *widths),
                )
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error
        self._flying += 1
        return table

    def over(self, table: Table) -> None:
        """The launch with this table is done."""
        self._flying -= 1
        self._spare.append(table)

    def _compile(self, table: Any, ours: Any, theirs: Any, count: int, places: int, lanes: int) -> Any:
        """And launches; all three tables are on the device."""
        rest = _TILE, ours.shape[1], theirs.shape[1]
        with torch.cuda.stream(torch.cuda.ExternalStream(self._stream, self._device)):
            return _copy_runs[(count * places * lanes,)](
                table, ours, theirs, count, places, lanes, *rest, num_warps=_WARPS
            )

    def _table(self, words: int) -> Table:
        while len(self._spare) + self._flying < _TABLES:
            self._spare.append(self._made())
        table = self._spare.pop() if self._spare else self._made()
        if table.room < words:
            table = Table(1 << (words - 1).bit_length(), self._device, table.event)
        return table

    def _made(self) -> Table:
        return Table(_WORDS, self._device, self._runtime.make_event(shared=False))

    def _pieces_of(self, place: Place) -> tuple[Any, int]:
        found = self._pieces.get(place)
        if found is None:
            table = torch.from_numpy(np.ascontiguousarray(place.table())).to(self._device)
            found = self._pieces[place] = table, table.data_ptr()
        return found
