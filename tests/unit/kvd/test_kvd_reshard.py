"""Copies between engines that divide their KV differently, against copying byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as but

from pdserve.kvd.plan import Planner
from pdserve.kvd.reshard import Match, described, match
from pdserve.kvd.types import Division, Layout, Part, Span
from pdserve.rpc.errors import IncompatibleEngines
from tests.unit.kvd.sides import Content, Memory, Side, contents, place, sides


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Content, Side, Side]:
    """Two engines that share a content."""
    content = draw(contents())
    return content, draw(sides(content)), draw(sides(content))


def memories(side: Side, seed: int) -> list[Memory]:
    """Noise."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in side.sizes]


def copied(
    pair: Match,
    src: Side,
    dst: Side,
    blocks: tuple[list[int], list[int]],
    first: int,
    cut: int,
    source: list[Memory],
    target: list[Memory],
) -> None:
    """Copies as pairing and copier do: units from the consumer's first on, in two goes."""
    ours, theirs = blocks
    wanted = min((first + len(theirs)) * pair.dst_units, len(ours) * pair.src_units)
    low = first * pair.dst_units
    middle = min(max(low, cut), wanted)
    for share in pair.shares:
        planner = Planner(src.layouts[share.src_rank], dst.layouts[share.dst_rank], share)
        for here, there in ((low, middle), (middle, wanted)):
            a = [ours[unit // pair.src_units] for unit in range(here, there)]
            b = [theirs[unit // pair.dst_units - first] for unit in range(here, there)]
            runs = planner.plan(range(pair.layers), a, b, here)
            for at, to, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
                target[share.dst_rank][to : to + length] = source[share.src_rank][at : at + length]


@given(pairs(), st.data())
@settings(deadline=None, max_examples=150, print_blob=True)
def test_every_byte_is_where_a_copy_by_token_and_head_puts_it(
    pair: tuple[Content, Side, Side], data: st.DataObject
) -> None:
    """Whatever the ranks, block sizes and orders of the two: each rank of the consumer holds what its heads' tokens
    have at the producer, and no byte beside them has changed."""
    content, src, dst = pair
    ours = data.draw(st.permutations(range(src.num_blocks))).copy()[: data.draw(st.integers(1, src.num_blocks))]
    tokens = len(ours) * src.block_size
    needed = -(-tokens // dst.block_size)
    theirs = data.draw(st.permutations(range(dst.num_blocks))).copy()
    first = data.draw(st.integers(max(0, needed - dst.num_blocks), needed - 1))
    theirs = theirs[: needed - first]
    for side in (src, dst):
        for layout, size in zip(side.layouts, side.sizes, strict=True):
            layout.check(size)
    source, target = memories(src, 1), memories(dst, 2)
    expected = [memory.copy() for memory in target]
    place(src, source, ours, range(tokens // content.step))
    wanted = range(first * dst.block_size // content.step, min(tokens, needed * dst.block_size) // content.step)
    place(dst, expected, [-1] * first + theirs, wanted)
    found = match(src.layouts, dst.layouts)
    copied(found, src, dst, (ours, theirs), first, data.draw(st.integers(0, 20)), source, target)
    for rank, (have, want) in enumerate(zip(target, expected, strict=True)):
        assert (have == want).all(), f"rank {rank}"


@given(pairs())
@settings(deadline=None)
def test_each_head_comes_once(pair: tuple[Content, Side, Side]) -> None:
    """The shares of a destination rank are its heads, each once, and given by ranks that hold them."""
    _, src, dst = pair
    found = match(src.layouts, dst.layouts)
    for rank, layout in enumerate(dst.layouts):
        assert layout.division is not None
        heads = [h for s in found.shares if s.dst_rank == rank for h in range(s.first_head, s.first_head + s.heads)]
        held = range(layout.division.first_head, layout.division.first_head + layout.division.heads)
        assert heads == list(held)
    for share in found.shares:
        division = src.layouts[share.src_rank].division
        assert division is not None
        assert division.first_head <= share.first_head
        assert share.first_head + share.heads <= division.first_head + division.heads
        assert share.dst_rank in found.takers[share.src_rank]


def rank(first: int = 0, heads: int = 2, total: int = 2, block_size: int = 16, **more: object) -> Layout:
    """Token after token, K and V of 8 bytes."""
    parts = (Part("k", 0, 0, heads * 16, 16, 1, 0, 8), Part("v", 0, 8, heads * 16, 16, 1, 0, 8))
    length = heads * 16 * block_size
    division = Division(first, heads, total, parts)
    return but(Layout(block_size, 4, ((Span(0, length, length),),), division), **more)


def test_replicas_share_the_work() -> None:
    """Four ranks of one latent to two: each of the two takes from another one of the four."""
    found = match([rank(0, 1, 1)] * 4, [rank(0, 1, 1)] * 2)
    assert found.takers == ((0,), (1,), (), ())


def test_one_rank_gathers_from_two_and_gives_to_two() -> None:
    """Heads 0 and 1 on two ranks, and both on one."""
    two, one = [rank(0, 1), rank(1, 1)], [rank(0, 2)]
    assert match(two, one).takers == ((0,), (0,))
    assert match(one, two).takers == ((0, 1),)
    assert [(s.first_head, s.heads) for s in match(one, two).shares] == [(0, 1), (1, 1)]


def test_like_goes_to_like_as_it_is() -> None:
    """Engines of one configuration: rank to rank, block by block, whatever their pools."""
    ours, theirs = [rank(0, 1), rank(1, 1)], [rank(0, 1, num_blocks=9), rank(1, 1, num_blocks=9)]
    found = match(ours, theirs)
    assert (found.src_units, found.dst_units, found.takers) == (1, 1, ((0,), (1,)))
    assert Planner(ours[1], theirs[1], found.share(1, 1)).each == 1
    with pytest.raises(ValueError, match="gives nothing"):
        found.share(0, 1)


def _division(**more: object) -> Layout:
    layout = rank()
    assert layout.division is not None
    return but(layout, division=but(layout.division, **more))


REFUSALS: dict[str, tuple[list[Layout], list[Layout], str]] = {
    "other heads": ([rank(0, 2, 2)], [rank(0, 2, 4), rank(2, 2, 4)], "kv_heads: 2 != 4"),
    "a head that nobody has": ([rank(0, 1)], [rank(0, 2)], "no source rank holds KV head 1"),
    "other layers": ([rank()], [but(rank(), layers=rank().layers * 2)], "layers: 1 != 2"),
    "tiles": ([rank()], [_division(step=2)], "tokens per tile: 1 != 2"),
    "another dtype": ([rank()], [_division(parts=(Part("kv", 0, 0, 32, 16, 1, 0, 16),))], "k 8 B, v 8 B != kv 16 B"),
    "not told of one": ([rank()], [but(rank(), division=None)], "division"),
    "not told, other ranks": ([rank(), rank()], [but(rank(), division=None)], "ranks: 2 != 1"),
    "not told, other blocks": (
        [but(rank(), division=None)],
        [but(rank(block_size=32), division=None)],
        "block_size: 16 != 32",
    ),
}


@pytest.mark.parametrize(("src", "dst", "told"), list(REFUSALS.values()), ids=list(REFUSALS))
def test_what_cannot_be_converted_is_refused_with_both_layouts(src: list[Layout], dst: list[Layout], told: str) -> None:
    """The message says what differs and how each side's KV lies."""
    with pytest.raises(IncompatibleEngines) as caught:
        match(src, dst)
    assert told in caught.value.message
    assert f"source: {described(src[0], len(src))}" in caught.value.message
    assert f"destination: {described(dst[0], len(dst))}" in caught.value.message
    assert caught.value.metadata


BAD: dict[str, dict[str, object]] = {
    "a part beyond its block": {"parts": (Part("k", 0, 0, 32, 16, 1, 0, 8), Part("v", 0, 16, 32, 16, 1, 0, 8))},
    "a part before its block": {"parts": (Part("k", 0, -1, 32, 16, 1, 0, 8), Part("v", 0, 8, 32, 16, 1, 0, 8))},
    "a span that is not there": {"parts": (Part("k", 1, 0, 32, 16, 1, 0, 8), Part("v", 0, 8, 32, 16, 1, 0, 8))},
    "bytes that are nobody's": {"parts": (Part("k", 0, 0, 32, 16, 1, 0, 8),)},
    "one part twice": {"parts": (Part("k", 0, 0, 32, 16, 1, 0, 8), Part("k", 0, 8, 32, 16, 1, 0, 8))},
    "no heads": {"heads": 0},
    "heads beyond the model's": {"first_head": 1},
    "half a step": {"step": 5},
}


@pytest.mark.parametrize("change", list(BAD.values()), ids=list(BAD))
def test_a_division_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    """A rank or a peer says how a block divides: one that reaches beyond the block would move others' bytes."""
    rank().check(4 * 512)
    with pytest.raises(ValueError, match=r"rank|part|span|steps|fill"):
        _division(**change).check(4 * 512)
