"""Copies between blocks that divide their bytes differently. Pure; numpy only.

Of each unit (see `reshard`) a *pattern* says which bytes of its source block go where in its destination block; it
depends only on where in the two blocks the unit lies, and is made once. A plan puts patterns behind blocks and layers.

    source block, 2 heads of 16 tokens    [h0: t0 .. t15][h1: t0 .. t15]
    destination, tokens before heads      [t0: h0 h1][t1: h0 h1] ...            a run for each token and head
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.kvd.reshard import Share
from pdserve.kvd.runs import Numbers, Runs, joined, merge
from pdserve.kvd.types import Division, Layout, Part


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Runs between one span of the source and one of the destination, from the starts of their blocks."""

    src_span: int
    dst_span: int
    src: Numbers
    dst: Numbers
    length: Numbers


class Views:
    """Plans one share, from the blocks of one rank to those of another; both have a division."""

    def __init__(self, src: Layout, dst: Layout, share: Share) -> None:
        assert src.division is not None
        assert dst.division is not None
        self._src_division, self._dst_division = src.division, dst.division
        self._share = share
        unit = math.gcd(src.block_size, dst.block_size)
        self._steps = unit // src.division.step
        self._src_units, self._dst_units = src.block_size // unit, dst.block_size // unit
        self._src_spans, self._dst_spans = _spans(src), _spans(dst)
        self._patterns: dict[tuple[int, int], list[_Pattern]] = {}

    @property
    def each(self) -> int:
        """Ranges that a plan goes through for each unit in each layer, before neighbours are joined."""
        return sum(len(pattern.length) for pattern in self._pattern(0, 0))

    def plan(self, layers: Sequence[int], src_blocks: Numbers, dst_blocks: Numbers, first: int) -> Runs:
        """The runs of units `first`, `first + 1`, ...: unit `first + i` lies in `src_blocks[i]` and `dst_blocks[i]`.
        At least one unit and one layer."""
        order = np.argsort(src_blocks, kind="stable")  # of units, so that their many runs need none
        number, src_blocks, dst_blocks = first + order, src_blocks[order], dst_blocks[order]
        src_at, dst_at = number % self._src_units, number % self._dst_units
        chosen = np.asarray(layers)
        parts: list[tuple[Numbers, Numbers, Numbers]] = []
        for at, to in sorted({*zip(src_at.tolist(), dst_at.tolist(), strict=True)}):
            here = np.flatnonzero((src_at == at) & (dst_at == to))
            for pattern in self._pattern(at, to):
                src = _starts(self._src_spans[pattern.src_span][chosen], src_blocks[here])
                dst = _starts(self._dst_spans[pattern.dst_span][chosen], dst_blocks[here])
                length = np.broadcast_to(pattern.length, (*src.shape, len(pattern.length)))
                parts.append(
                    ((src[..., None] + pattern.src).ravel(), (dst[..., None] + pattern.dst).ravel(), length.ravel())
                )
        return merge(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _pattern(self, src_at: int, dst_at: int) -> list[_Pattern]:
        """For a unit that is number `src_at` in its source block and `dst_at` in its destination block."""
        known = self._patterns.get((src_at, dst_at))
        if known is not None:
            return known
        theirs = {part.name: part for part in self._dst_division.parts}
        groups: dict[tuple[int, int], list[tuple[Numbers, Numbers, Numbers]]] = {}
        for part in self._src_division.parts:
            other = theirs[part.name]
            src_units, dst_units, nbytes = _pieces(part, other)
            src = self._addresses(self._src_division, part, src_at, src_units)
            dst = self._addresses(self._dst_division, other, dst_at, dst_units)
            groups.setdefault((part.span, other.span), []).append((src, dst, np.full(len(src), nbytes)))
        made = [
            _Pattern(*spans, *joined(*(np.concatenate(columns) for columns in zip(*found, strict=True))))
            for spans, found in groups.items()
        ]
        self._patterns[src_at, dst_at] = made
        return made

    def _addresses(self, division: Division, part: Part, at: int, units: Numbers) -> Numbers:
        """Of every step, head and piece of a unit, in this order; from the start of the block."""
        steps = (at * self._steps + np.arange(self._steps)) * part.step_stride
        heads = (self._share.first_head - division.first_head + np.arange(self._share.heads)) * part.head_stride
        return (part.offset + steps[:, None, None] + heads[None, :, None] + units[None, None, :]).ravel()


def _spans(layout: Layout) -> Numbers:
    """Offset and stride by span and layer. A division has equally many spans in each layer."""
    rows = [[(span.offset, span.stride) for span in layer] for layer in layout.layers]
    return np.asarray(rows, dtype=np.int64).transpose(1, 0, 2)


def _starts(spans: Numbers, blocks: Numbers) -> Numbers:
    """Where blocks begin, by layer and block."""
    return np.asarray(spans[:, :1] + spans[:, 1:] * blocks[None, :], dtype=np.int64)


def _pieces(src: Part, dst: Part) -> tuple[Numbers, Numbers, int]:
    """Where the bytes of one step of one head lie on both sides, in pieces that lie together on both, and their
    length."""
    nbytes = math.gcd(src.unit_bytes, dst.unit_bytes)
    at = np.arange(0, src.units * src.unit_bytes, nbytes)
    return (
        at // src.unit_bytes * src.unit_stride + at % src.unit_bytes,
        at // dst.unit_bytes * dst.unit_stride + at % dst.unit_bytes,
        nbytes,
    )
