"""The copy plan: which bytes of one region go where in another. Pure; numpy only.

Contiguous runs are merged wherever both sides are contiguous, also over layers:

    src  [b3][b4][b5]....[b9]      dst  [b0][b1][b2]..[b7]     blocks (3,0) (4,1) (5,2) (9,7)
         '----------'    '--'           '----------'  '--'     two runs
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.types import Layout
from pdserve.rpc.errors import IncompatibleEngines

Offsets = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges to copy: `length[i]` bytes from `src[i]` to `dst[i]`, offsets into the regions."""

    src: Offsets
    dst: Offsets
    length: Offsets

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)


def layout_difference(src: Layout, dst: Layout) -> dict[str, str]:
    """What keeps two layouts from being copied block by block, by name; empty when nothing does.

    Strides, offsets and the number of blocks may differ.
    """
    difference: dict[str, str] = {}
    if src.block_size != dst.block_size:
        difference["block_size"] = f"{src.block_size} != {dst.block_size}"
    if len(src.layers) != len(dst.layers):
        difference["layers"] = f"{len(src.layers)} != {len(dst.layers)}"
        return difference
    for index, (ours, theirs) in enumerate(zip(src.layers, dst.layers, strict=True)):
        a, b = [s.length for s in ours], [s.length for s in theirs]
        if a != b:
            difference[f"layer {index} bytes per block"] = f"{a} != {b}"
            break
    return difference


def check_layouts(src: Layout, dst: Layout) -> None:
    """Raises IncompatibleEngines naming what differs."""
    difference = layout_difference(src, dst)
    if difference:
        told = ", ".join(f"{name}: {what}" for name, what in difference.items())
        raise IncompatibleEngines(f"layouts differ: {told}", **difference)


def make_plan(
    src: Layout, dst: Layout, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int]
) -> Runs:
    """The runs that copy `src_blocks[i]` to `dst_blocks[i]` in each of `layers`.

    Raises:
        IncompatibleEngines: the layouts cannot be copied block by block.
        ValueError: a block or layer that a layout does not have, or lists of unequal length.
    """
    check_layouts(src, dst)
    if len(src_blocks) != len(dst_blocks):
        raise ValueError(f"{len(src_blocks)} source blocks for {len(dst_blocks)} destinations")
    a = np.asarray(src_blocks, dtype=np.int64)
    b = np.asarray(dst_blocks, dtype=np.int64)
    if not len(a) or not len(layers):
        empty = np.empty(0, dtype=np.uint64)
        return Runs(empty, empty, empty)
    for ids, layout, name in ((a, src, "source"), (b, dst, "destination")):
        if ids.min() < 0 or ids.max() >= layout.num_blocks:
            raise ValueError(f"a {name} block lies outside 0..{layout.num_blocks - 1}")
    order = np.argsort(a, kind="stable")
    a, b = a[order], b[order]
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(a)])))
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    for index in layers:
        if not 0 <= index < len(src.layers):
            raise ValueError(f"layer {index} of {len(src.layers)}")
        for ours, theirs in zip(src.layers[index], dst.layers[index], strict=True):
            if ours.stride == ours.length and theirs.stride == theirs.length:
                pieces.append(
                    (
                        ours.offset + a[starts] * ours.stride,
                        theirs.offset + b[starts] * theirs.stride,
                        counts * ours.length,
                    )
                )
            else:
                pieces.append(
                    (ours.offset + a * ours.stride, theirs.offset + b * theirs.stride, np.full(len(a), ours.length))
                )
    return _merge(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _merge(src: NDArray[np.int64], dst: NDArray[np.int64], length: NDArray[np.int64]) -> Runs:
    order = np.argsort(src, kind="stable")
    src, dst, length = src[order], dst[order], length[order]
    joined = (src[:-1] + length[:-1] == src[1:]) & (dst[:-1] + length[:-1] == dst[1:])
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return Runs(
        src[starts].astype(np.uint64), dst[starts].astype(np.uint64), np.add.reduceat(length, starts).astype(np.uint64)
    )
