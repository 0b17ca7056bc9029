"""Which rank gives what to which, where two engines divide their KV differently. Pure.

    prefill, 2 ranks  |h0 h1|  |h2 h3|     shares   rank 0 -> 0: heads 0, 1
    decode, 1 rank    |h0  h1  h2  h3|              rank 1 -> 0: heads 2, 3

A *unit* is a run of tokens that lies in one block on either side: as many tokens as both block sizes are multiples of.

    source, blocks of 16       | 0 | 1 | 2 |
    units                      | 0 | 1 | 2 |          between blocks of one size a unit is a block
    destination, blocks of 32  |   0   |   1   |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.kvd.types import Division, Layout, Part
from pdserve.rpc.errors import IncompatibleEngines


@dataclass(frozen=True, slots=True)
class Share:
    """What one source rank gives to one destination rank."""

    src_rank: int
    dst_rank: int
    first_head: int
    """Of the model's."""
    heads: int


@dataclass(frozen=True, slots=True)
class Match:
    """How blocks go from the ranks of one engine to those of another."""

    layers: int
    src_units: int
    """Units in a block of the source."""
    dst_units: int
    shares: tuple[Share, ...]
    """By destination rank, then head: each head that a destination rank holds is in exactly one."""
    takers: tuple[tuple[int, ...], ...]
    """By source rank: the destination ranks that take from it. Empty: another rank holds the same."""

    def share(self, src_rank: int, dst_rank: int) -> Share:
        """What one rank gives to another.

        Raises:
            ValueError: nothing.
        """
        for share in self.shares:
            if (share.src_rank, share.dst_rank) == (src_rank, dst_rank):
                return share
        raise ValueError(f"rank {src_rank} gives nothing to rank {dst_rank}")


def alike(src: Layout, dst: Layout) -> bool:
    """Whether a block of one can be copied to a block of the other as it is. Strides, offsets and the number of blocks
    may differ."""
    if src.block_size != dst.block_size or src.division != dst.division or len(src.layers) != len(dst.layers):
        return False
    pairs = zip(src.layers, dst.layers, strict=True)
    return src.layers == dst.layers or all([s.length for s in a] == [s.length for s in b] for a, b in pairs)


def match(src: Sequence[Layout], dst: Sequence[Layout]) -> Match:
    """Pairs the ranks of two engines, each given as its layouts by rank.

    Raises:
        IncompatibleEngines: one cannot be copied to the other; says what differs, and both layouts.
    """
    if len(src) == len(dst) and all(map(alike, src, dst)):
        heads = [(layout.division.first_head, layout.division.heads) if layout.division else (0, 0) for layout in src]
        shares = tuple(Share(rank, rank, *held) for rank, held in enumerate(heads))
        return Match(len(src[0].layers), 1, 1, shares, tuple((rank,) for rank in range(len(src))))
    difference = layout_difference(src, dst)
    found = [] if difference else _shares([_known(layout) for layout in src], [_known(layout) for layout in dst])
    if isinstance(found, str):
        difference = {"heads": found}
    if difference or isinstance(found, str):
        told = ", ".join(f"{name}: {what}" for name, what in difference.items())
        raise IncompatibleEngines(
            f"layouts differ: {told}; source: {described(src[0], len(src))}; "
            f"destination: {described(dst[0], len(dst))}",
            **difference,
        )
    unit = math.gcd(src[0].block_size, dst[0].block_size)
    takers = tuple(tuple(s.dst_rank for s in found if s.src_rank == rank) for rank in range(len(src)))
    return Match(len(src[0].layers), src[0].block_size // unit, dst[0].block_size // unit, tuple(found), takers)


def layout_difference(src: Sequence[Layout], dst: Sequence[Layout]) -> dict[str, str]:
    """What keeps the ranks of one engine from being copied to those of another, by name; empty where nothing does."""
    theirs = [len(layout.layers) for layout in dst]
    if odd := [count for layout in src for count in theirs if count != len(layout.layers)]:
        return {"layers": f"{len(src[0].layers)} != {odd[0]}"}
    divisions = [layout.division for layout in (*src, *dst)]
    if any(division is None for division in divisions):
        return _as_they_are(src, dst)
    ours = [(layout.block_size, _held(layout)) for layout in src]
    others = [(layout.block_size, _held(layout)) for layout in dst]
    if odd_ranks := [held for side in (ours, others) for held in side if held != side[0]]:
        return {"ranks": f"those of one engine differ: {odd_ranks[0]}"}
    (_, (heads, step, contents)), (_, (other_heads, other_step, other_contents)) = ours[0], others[0]
    difference: dict[str, str] = {}
    if heads != other_heads:
        difference["kv_heads"] = f"{heads} != {other_heads}"
    if step != other_step:
        difference["tokens per tile"] = f"{step} != {other_step}"
    if contents != other_contents:
        difference["bytes of a token and head"] = f"{contents} != {other_contents}"
    return difference


def content(division: Division) -> str:
    """What a token's share of a head consists of, in words: equal where two engines' KV can be converted."""
    if division.step == 1:
        return ", ".join(f"{p.name} {p.units * p.unit_bytes} B" for p in _by_name(division))
    tiles = ", ".join(f"{p.name} {p.units} x {p.unit_bytes} B" for p in _by_name(division))
    return f"{tiles} per {division.step} tokens"


def described(first: Layout, count: int) -> str:
    """The layout of an engine of `count` ranks in words, by that of its first."""
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    blocks = f"blocks of {first.block_size} tokens in {len(first.layers)} layers"
    division = first.division
    if division is None:
        lengths = " + ".join(str(span.length) for span in first.layers[0])
        return f"{ranks}, {blocks}, {lengths} B a layer, undivided"
    held = f"{ranks} of {division.heads} of {division.total_heads} KV heads"
    outer = "heads before tokens" if division.parts[0].head_stride > division.parts[0].step_stride else "tokens first"
    apart = ", parts apart" if len(first.layers[0]) > 1 else ""
    return f"{held}, {blocks}, {outer}{apart}, a token and head {content(division)}"


def _known(layout: Layout) -> Division:
    assert layout.division is not None
    return layout.division


def _by_name(division: Division) -> list[Part]:
    return sorted(division.parts, key=lambda part: part.name)


def _held(layout: Layout) -> tuple[int, int, str]:
    division = _known(layout)
    return division.total_heads, division.step, content(division)


def _as_they_are(src: Sequence[Layout], dst: Sequence[Layout]) -> dict[str, str]:
    """What differs between layouts whose blocks can only be copied whole."""
    if len(src) != len(dst):
        return {"ranks": f"{len(src)} != {len(dst)}"}
    for ours, theirs in zip(src, dst, strict=True):
        difference: dict[str, str] = {}
        if ours.block_size != theirs.block_size:
            difference["block_size"] = f"{ours.block_size} != {theirs.block_size}"
        for index, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            lengths, others = [s.length for s in a], [s.length for s in b]
            if lengths != others:
                difference[f"layer {index} bytes per block"] = f"{lengths} != {others}"
                break
        if not difference and ours.division != theirs.division:
            difference["division"] = "known of one only, or of other heads"
        if difference:
            return difference
    return {}


def _shares(src: Sequence[Division], dst: Sequence[Division]) -> list[Share] | str:
    """Who gives which heads to whom; else which head nobody has, in words. Where several ranks hold a head, as with
    more ranks than heads, those that take it are spread over them."""
    shares: list[Share] = []
    for rank, wants in enumerate(dst):
        head, end = wants.first_head, wants.first_head + wants.heads
        while head < end:
            having = [r for r, has in enumerate(src) if has.first_head <= head < has.first_head + has.heads]
            if not having:
                return f"no source rank holds KV head {head}, which destination rank {rank} holds"
            giver = having[rank % len(having)]
            upto = min(end, src[giver].first_head + src[giver].heads)
            shares.append(Share(giver, rank, head, upto - head))
            head = upto
    return shares
