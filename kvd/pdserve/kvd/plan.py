"""The copy plan: which bytes of one region go where in another. Pure; numpy only.

Contiguous runs are merged wherever both sides are contiguous, also over layers:

    src  [b3][b4][b5]....[b9]      dst  [b0][b1][b2]..[b7]     blocks (3,0) (4,1) (5,2) (9,7)
         '----------'    '--'           '----------'  '--'     two runs
"""

import itertools
import operator
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
    if src == dst:  # the rule, between engines of one configuration
        return difference
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


class Planner:
    """Plans copies from regions of one layout to those of another; the two are compared once."""

    def __init__(self, src: Layout, dst: Layout) -> None:
        """Raises IncompatibleEngines where the layouts cannot be copied block by block."""
        check_layouts(src, dst)
        self._src = src
        self._dst = dst
        pairs = [list(zip(ours, theirs, strict=True)) for ours, theirs in zip(src.layers, dst.layers, strict=True)]
        rows = [(a.offset, a.stride, b.offset, b.stride, a.length) for layer in pairs for a, b in layer]
        self._spans = np.array(rows, dtype=np.int64).reshape(-1, 5)
        """A row for each span of each layer."""
        self._first = [0, *itertools.accumulate(len(layer) for layer in pairs)]
        """Where each layer's rows begin, and one past the last."""
        self._solid = all(a.stride == a.length == b.stride for layer in pairs for a, b in layer)
        """Neighbouring blocks touch, in every span of both."""

    def plan(self, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Runs:
        """The runs that copy `src_blocks[i]` to `dst_blocks[i]` in each of `layers`.

        Raises:
            ValueError: a block or layer that a layout does not have, or lists of unequal length.
        """
        if len(src_blocks) != len(dst_blocks):
            raise ValueError(f"{len(src_blocks)} source blocks for {len(dst_blocks)} destinations")
        if not len(src_blocks) or not len(layers):
            empty = np.empty(0, dtype=np.uint64)
            return Runs(empty, empty, empty)
        for ids, layout, name in ((src_blocks, self._src, "source"), (dst_blocks, self._dst, "destination")):
            if min(ids) < 0 or max(ids) >= layout.num_blocks:
                raise ValueError(f"a {name} block lies outside 0..{layout.num_blocks - 1}")
        a = np.asarray(src_blocks, dtype=np.int64)
        b = np.asarray(dst_blocks, dtype=np.int64)
        order = np.argsort(a, kind="stable")
        a, b = a[order], b[order]
        at, a_stride, to, b_stride, length = self._rows(layers).T[:, :, None]
        if self._solid:
            breaks = np.flatnonzero((a[1:] - a[:-1] != 1) | (b[1:] - b[:-1] != 1)) + 1
            starts = np.concatenate(([0], breaks))
            counts = np.concatenate((breaks, [len(a)])) - starts
            a, b = a[starts], b[starts]
        else:
            counts = np.ones(len(a), dtype=np.int64)
        return _merge((at + a * a_stride).ravel(), (to + b * b_stride).ravel(), (counts * length).ravel())

    def _rows(self, layers: Sequence[int]) -> NDArray[np.int64]:
        count = len(self._first) - 1
        for index in layers:
            if not 0 <= index < count:
                raise ValueError(f"layer {index} of {count}")
        if len(layers) == count and all(map(operator.eq, layers, itertools.count())):
            return self._spans
        return self._spans[[row for index in layers for row in range(self._first[index], self._first[index + 1])]]


def make_plan(
    src: Layout, dst: Layout, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int]
) -> Runs:
    """One plan between two layouts.

    Raises:
        IncompatibleEngines: the layouts cannot be copied block by block.
        ValueError: a block or layer that a layout does not have, or lists of unequal length.
    """
    return Planner(src, dst).plan(layers, src_blocks, dst_blocks)


def _merge(src: NDArray[np.int64], dst: NDArray[np.int64], length: NDArray[np.int64]) -> Runs:
    order = np.argsort(src, kind="stable")
    src, dst, length = src[order], dst[order], length[order]
    joined = (src[:-1] + length[:-1] == src[1:]) & (dst[:-1] + length[:-1] == dst[1:])
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return Runs(
        src[starts].astype(np.uint64), dst[starts].astype(np.uint64), np.add.reduceat(length, starts).astype(np.uint64)
    )
