"""The copy plan: which bytes of one region go where in another. Pure; numpy only.

Contiguous runs are merged wherever both sides are contiguous, also over layers:

    src  [b3][b4][b5]....[b9]      dst  [b0][b1][b2]..[b7]     blocks (3,0) (4,1) (5,2) (9,7)
         '----------'    '--'           '----------'  '--'     two runs

Where two ranks divide their blocks differently, `views` has the plan. One of many pieces is made in slices, each when
it is asked for: it may be of millions.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.reshard import Share, alike, match
from pdserve.kvd.runs import Numbers, Offsets, Repeated, Runs, merge, nothing
from pdserve.kvd.slices import cut
from pdserve.kvd.types import Layout
from pdserve.kvd.views import Views

__all__ = ["Offsets", "Planner", "Runs", "make_plan"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """In pieces: byte ranges that a plan goes through before neighbours are joined."""

    quick: int
    """So many are planned as a whole, and on the event loop: it takes a millisecond or two at most."""
    slice: int
    """In a slice, at most; where a unit has more in a layer, those of one unit."""


WHOLE: Final = Bounds(1 << 16, 1 << 17)
"""Where blocks are copied as they are: a slice is gigabytes, and a prompt of one is the exception."""
DIVIDED: Final = Bounds(1 << 14, 1 << 15)
"""Where blocks are taken apart."""


class Planner:
    """Plans copies from the region of one rank to that of another; the two layouts are compared once."""

    def __init__(self, src: Layout, dst: Layout, share: Share | None = None) -> None:
        """`share`: what the one rank gives to the other; None where each is all of its engine.

        Raises:
            IncompatibleEngines: the layouts cannot be copied, one to the other.
        """
        self._src = src
        self._dst = dst
        self._views: Views | None = None
        """Where blocks are not copied as they are."""
        self._bounds = WHOLE
        self.each = max(map(len, src.layers), default=0)
        """Pieces of a unit in a layer, at most."""
        if not alike(src, dst) or not _whole(src, share):
            self._views = Views(src, dst, share or match([src], [dst]).shares[0])
            self._bounds, self.each = DIVIDED, self._views.each
            return
        pairs = [list(zip(ours, theirs, strict=True)) for ours, theirs in zip(src.layers, dst.layers, strict=True)]
        rows = [(a.offset, a.stride, b.offset, b.stride, a.length) for layer in pairs for a, b in layer]
        self._spans = np.array(rows, dtype=np.int64).reshape(-1, 5)
        """A row for each span of each layer."""
        self._first = [0, *itertools.accumulate(len(layer) for layer in pairs)]
        """Where each layer's rows begin, and one past the last."""
        self._solid = all(a.stride == a.length == b.stride for layer in pairs for a, b in layer)
        """Neighbouring blocks touch, in every span of both."""
        self._uniform = len({row[1::2] + row[4:] for row in rows}) == 1
        """Every span has the same strides and length."""

    def quick(self, units: int, layers: int) -> bool:
        """Whether so much is planned as a whole."""
        return units * layers * self.each <= self._bounds.quick

    def plan(self, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int], first: int = 0) -> Runs:
        """The runs that copy units in each of `layers`: unit `first + i` of a prompt from `src_blocks[i]` to
        `dst_blocks[i]`. Between blocks of one size a unit is a block.

        Raises:
            ValueError: a block or layer that a layout does not have, or lists of unequal length.
        """
        return self._plan(layers, *self._checked(layers, src_blocks, dst_blocks), first)

    def slices(
        self, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int], first: int = 0
    ) -> Iterator[Runs]:
        """The same bytes as those of `plan` in slices, of which each is made when it is asked for, by whichever thread;
        its lists too, so that nobody else makes them.

        Raises:
            ValueError: as `plan`, before the first of them.
        """
        a, b = self._checked(layers, src_blocks, dst_blocks)
        parts = cut(len(layers), len(a), self.each, self._bounds.slice)
        return (
            self._plan(layers[part.layers], a[part.units], b[part.units], first + part.units.start).listed()
            for part in parts
        )

    def _checked(
        self, layers: Sequence[int], src_blocks: Sequence[int], dst_blocks: Sequence[int]
    ) -> tuple[Numbers, Numbers]:
        if len(src_blocks) != len(dst_blocks):
            raise ValueError(f"{len(src_blocks)} source blocks for {len(dst_blocks)} destinations")
        if len(src_blocks) and len(layers):
            for ids, layout, name in ((src_blocks, self._src, "source"), (dst_blocks, self._dst, "destination")):
                if min(ids) < 0 or max(ids) >= layout.num_blocks:
                    raise ValueError(f"a {name} block lies outside 0..{layout.num_blocks - 1}")
            self._check_layers(layers)
        return np.asarray(src_blocks, dtype=np.int64), np.asarray(dst_blocks, dtype=np.int64)

    def _plan(self, layers: Sequence[int], a: Numbers, b: Numbers, first: int) -> Runs:
        if not len(a) or not len(layers):
            return nothing()
        if self._views is not None:
            return self._views.plan(layers, a, b, first)
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
        if self._uniform and len(at) > 1:
            pattern = merge(a * a_stride[0], b * b_stride[0], counts * length[0])
            return Repeated(pattern, at[:, 0].astype(np.uint64), to[:, 0].astype(np.uint64))
        return merge((at + a * a_stride).ravel(), (to + b * b_stride).ravel(), (counts * length).ravel())

    def _check_layers(self, layers: Sequence[int]) -> None:
        count = len(self._src.layers)
        for index in layers:
            if not 0 <= index < count:
                raise ValueError(f"layer {index} of {count}")

    def _rows(self, layers: Sequence[int]) -> NDArray[np.int64]:
        if len(layers) == len(self._first) - 1 and all(map(operator.eq, layers, itertools.count())):
            return self._spans
        return self._spans[[row for index in layers for row in range(self._first[index], self._first[index + 1])]]


def _whole(src: Layout, share: Share | None) -> bool:
    division = src.division
    return share is None or division is None or (share.first_head, share.heads) == (division.first_head, division.heads)


def make_plan(
    src: Layout,
    dst: Layout,
    layers: Sequence[int],
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    first: int = 0,
) -> Runs:
    """One plan between two layouts, each all of its engine.

    Raises:
        IncompatibleEngines: the layouts cannot be copied, one to the other.
        ValueError: a block or layer that a layout does not have, or lists of unequal length.
    """
    return Planner(src, dst).plan(layers, src_blocks, dst_blocks, first)
