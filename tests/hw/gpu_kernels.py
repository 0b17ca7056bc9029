"""Other ways to write kvd's kernel, to be measured beside it by `gpu_variants`.

One kernel with everything that can be varied as a constant: what it does is what `transport/device/kernel.py` says of
its own, whose lookup of pieces it uses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
import triton.language as tl

from pdserve.kvd.transport.device import kernel

_find: Final = kernel._find
_MOST_LANES: Final = 64


@triton.jit  # type: ignore[untyped-decorator]
def _copy_lane(  # type: ignore[no-untyped-def]
    unit,
    table,
    src_pieces,
    dst_pieces,
    runs,
    lanes,
    TILE: tl.constexpr,
    SRC_WIDTH: tl.constexpr,
    DST_WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE: tl.constexpr,
    STORE_EVICT: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    run = unit // lanes
    src_at = tl.load(table + run)
    dst_at = tl.load(table + runs + run)
    nbytes = tl.load(table + 2 * runs + run)
    tile = (unit % lanes).to(tl.int64) * TILE
    while tile < nbytes:
        at = tile
        end = tl.minimum(tile + TILE, nbytes)
        while at < end:
            src = src_at + at
            dst = dst_at + at
            here = end - at
            if LOOKUP:
                src, src_room = _find(src_pieces, src, SRC_WIDTH)
                dst, dst_room = _find(dst_pieces, dst, DST_WIDTH)
                here = tl.minimum(here, tl.minimum(src_room, dst_room))
            words = tl.multiple_of((here // 4).to(tl.int32), 4)
            src_words = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), 16)
            dst_words = tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), 16)
            index = tl.arange(0, TILE // 4)
            inside = index < words
            value = tl.load(src_words + index, mask=inside, cache_modifier=LOAD, eviction_policy=LOAD_EVICT)
            tl.store(dst_words + index, value, mask=inside, cache_modifier=STORE, eviction_policy=STORE_EVICT)
            at += here
        tile += lanes.to(tl.int64) * TILE


@triton.jit(do_not_specialize=["runs", "lanes"])  # type: ignore[untyped-decorator]
def copy_runs(  # type: ignore[no-untyped-def]
    table,
    src_pieces,
    dst_pieces,
    runs,
    lanes,
    TILE: tl.constexpr,
    SRC_WIDTH: tl.constexpr,
    DST_WIDTH: tl.constexpr,
    LOAD: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE: tl.constexpr,
    STORE_EVICT: tl.constexpr,
    LOOKUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Without LOOKUP the table has addresses, and a tile lies in one piece. With FEW there are fewer programs than
    lanes of runs."""
    unit = tl.program_id(0)
    if FEW:
        while unit < runs * lanes:
            _copy_lane(
                unit,
                table,
                src_pieces,
                dst_pieces,
                runs,
                lanes,
                TILE,
                SRC_WIDTH,
                DST_WIDTH,
                LOAD,
                LOAD_EVICT,
                STORE,
                STORE_EVICT,
                LOOKUP,
            )
            unit += tl.num_programs(0)
    else:
        _copy_lane(
            unit,
            table,
            src_pieces,
            dst_pieces,
            runs,
            lanes,
            TILE,
            SRC_WIDTH,
            DST_WIDTH,
            LOAD,
            LOAD_EVICT,
            STORE,
            STORE_EVICT,
            LOOKUP,
        )


@dataclass(frozen=True)
class Work:
    """What one launch copies, on the device."""

    table: Any
    """A list of runs, and one place at no offset."""
    addresses: Any
    """The same with addresses instead of offsets."""
    runs: int
    total: int
    """Bytes."""
    src: Any
    dst: Any
    pattern: Any
    """The table of a pattern and its places."""
    pattern_runs: int
    places: int


@dataclass(frozen=True)
class Kernel:
    """One way to write it."""

    name: str
    tile: int = 16 << 10
    warps: int = 4
    load: str = ""
    load_evict: str = ""
    store: str = ""
    store_evict: str = ""
    lookup: bool = True
    per_processor: int = 0
    """Programs for each multiprocessor; 0: one for each lane of each run."""
    launch_of: Callable[[Work, int], None] | None = field(default=None, compare=False)
    """Launches another kernel than the one of this file, with so many lanes."""

    def launch(self, work: Work) -> None:
        """On torch's stream."""
        lanes = min(_MOST_LANES, max(1, -(-work.total // (work.runs * self.tile))))
        if self.launch_of is not None:
            self.launch_of(work, lanes)
            return
        grid = work.runs * lanes
        if self.per_processor:
            grid = min(grid, self.per_processor * torch.cuda.get_device_properties(0).multi_processor_count)
        copy_runs[(grid,)](
            *(work.table if self.lookup else work.addresses, work.src, work.dst, work.runs, lanes),
            *(self.tile, work.src.shape[1], work.dst.shape[1]),
            *(self.load, self.load_evict, self.store, self.store_evict, self.lookup, self.per_processor > 0),
            num_warps=self.warps,
        )


def _own(work: Work, table: Any, runs: int, places: int, lanes: int) -> None:
    widths = work.src.shape[1], work.dst.shape[1]
    kernel._copy_runs[(runs * places * lanes,)](
        *(table, work.src, work.dst, runs, places, lanes, kernel._TILE, *widths), num_warps=kernel._WARPS
    )


def _as_it_is(work: Work, lanes: int) -> None:
    _own(work, work.pattern, work.pattern_runs, work.places, lanes)


def _as_a_list(work: Work, lanes: int) -> None:
    _own(work, work.table, work.runs, 1, lanes)


KERNELS: Final = (
    Kernel("as it is", kernel._TILE, kernel._WARPS, launch_of=_as_it_is),
    Kernel("as it is, again", kernel._TILE, kernel._WARPS, launch_of=_as_it_is),
    Kernel("as it is, of a list", kernel._TILE, kernel._WARPS, launch_of=_as_a_list),
    Kernel("16 KiB, 4 warps"),
    Kernel("4 KiB, 1 warp", 4 << 10, 1),
    Kernel("4 KiB, 2 warps", 4 << 10, 2),
    Kernel("8 KiB, 2 warps", 8 << 10, 2),
    Kernel("8 KiB, 4 warps", 8 << 10, 4),
    Kernel("16 KiB, 8 warps", warps=8),
    Kernel("32 KiB, 4 warps", 32 << 10, 4),
    Kernel("32 KiB, 8 warps", 32 << 10, 8),
    Kernel("64 KiB, 16 warps", 64 << 10, 16),
    Kernel("evict first", load_evict="evict_first", store_evict="evict_first"),
    Kernel("load evict first", load_evict="evict_first"),
    Kernel("store .cs", store=".cs"),
    Kernel("load evict first, store .cs", load_evict="evict_first", store=".cs"),
    Kernel("load .cg", load=".cg"),
    Kernel("store .wt", store=".wt"),
    Kernel("4 programs a multiprocessor", per_processor=4),
    Kernel("8 programs a multiprocessor", per_processor=8),
    Kernel("16 programs a multiprocessor", per_processor=16),
    Kernel("8 a multiprocessor, 32 KiB, 8 warps", 32 << 10, 8, per_processor=8),
    Kernel("pieces looked up on the host", lookup=False),
)
"""The first two are kvd's own: how far they are apart is noise."""
