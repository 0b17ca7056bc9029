"""The copy plan, against copying block by block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvd.plan import Planner, make_plan
from pdserve.kvd.reshard import layout_difference
from pdserve.kvd.types import Layout, Span
from pdserve.rpc.errors import IncompatibleEngines


@st.composite
def layouts(draw: st.DrawFn, lengths: list[list[int]]) -> tuple[Layout, int]:
    """A layout with these bytes per span: layers side by side, K and V apart, gaps between blocks, or
    all layers of a block together."""
    blocks = draw(st.integers(1, 9))
    if draw(st.booleans()):  # block-major: one stride for all
        stride = sum(sum(layer) for layer in lengths) + draw(st.sampled_from([0, 3]))
        layers, at = [], 0
        for layer in lengths:
            spans = []
            for length in layer:
                spans.append(Span(at, stride, length))
                at += length
            layers.append(tuple(spans))
        return Layout(16, blocks, tuple(layers)), stride * blocks
    layers, at = [], draw(st.sampled_from([0, 5]))
    for layer in lengths:
        spans = []
        for length in layer:
            stride = length + draw(st.sampled_from([0, 0, 4]))
            spans.append(Span(at, stride, length))
            at += stride * blocks
        layers.append(tuple(spans))
    return Layout(16, blocks, tuple(layers)), at


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, int, Layout, int, list[int], list[int], list[int]]:
    """Two layouts that fit, layers, and pairs of blocks with distinct destinations."""
    lengths = draw(st.lists(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=2), min_size=1, max_size=4))
    src, src_size = draw(layouts(lengths))
    dst, dst_size = draw(layouts(lengths))
    chosen = draw(st.lists(st.integers(0, dst.num_blocks - 1), unique=True, max_size=dst.num_blocks))
    sources = draw(st.lists(st.integers(0, src.num_blocks - 1), min_size=len(chosen), max_size=len(chosen)))
    layers = draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    return src, src_size, dst, dst_size, layers, sources, chosen


@given(cases())
@settings(deadline=None)
def test_runs_copy_exactly_what_block_by_block_would(
    case: tuple[Layout, int, Layout, int, list[int], list[int], list[int]],
) -> None:
    """Every byte of the destination, also those beside the blocks, is as the reference has it."""
    src, src_size, dst, dst_size, layers, sources, chosen = case
    src.check(src_size)
    dst.check(dst_size)
    source = np.random.default_rng(1).integers(0, 256, src_size, dtype=np.uint8)
    got = np.zeros(dst_size, dtype=np.uint8)
    reference = got.copy()
    for layer in layers:
        for a, b in zip(sources, chosen, strict=True):
            for here, there in zip(src.layers[layer], dst.layers[layer], strict=True):
                at, to = here.offset + a * here.stride, there.offset + b * there.stride
                reference[to : to + here.length] = source[at : at + here.length]
    runs = make_plan(src, dst, layers, sources, chosen)
    for at, to, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        got[to : to + length] = source[at : at + length]
    assert (got == reference).all()
    assert runs.total == len(chosen) * sum(s.length for layer in layers for s in src.layers[layer])


def test_neighbours_are_merged_and_only_where_both_sides_are() -> None:
    """Blocks that lie side by side on both sides are one run, over layers too where the layout allows."""
    layout = Layout(16, 8, ((Span(0, 64, 64),), (Span(512, 64, 64),)))
    runs = make_plan(layout, layout, [0], [3, 4, 5, 7], [0, 1, 2, 5])
    assert (runs.src.tolist(), runs.dst.tolist(), runs.length.tolist()) == ([192, 448], [0, 320], [192, 64])
    whole = make_plan(layout, layout, [0, 1], range(8), range(8))
    assert whole.length.tolist() == [1024]
    assert len(make_plan(layout, layout, [0], [1, 2], [2, 1])) == 2
    together = Layout(16, 4, ((Span(0, 128, 64),), (Span(64, 128, 64),)))
    assert make_plan(together, together, [0, 1], [2], [1]).length.tolist() == [128]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (Layout(32, 4, ((Span(0, 64, 64),),)), "block_size"),
        (Layout(16, 4, ((Span(0, 64, 64),), (Span(256, 64, 64),))), "layers"),
        (Layout(16, 4, ((Span(0, 32, 32),),)), "layer 0 bytes per block"),
        (Layout(16, 4, ((Span(0, 32, 32), Span(128, 32, 32)),)), "layer 0 bytes per block"),
    ],
)
def test_layouts_that_need_a_conversion_are_refused_by_name(other: Layout, name: str) -> None:
    """Unequal block size, layers or bytes per block of blocks that are not known to divide: refused, and the message
    says which."""
    ours = Layout(16, 4, ((Span(0, 64, 64),),))
    assert list(layout_difference([ours], [other])) == [name]
    with pytest.raises(IncompatibleEngines) as caught:
        make_plan(ours, other, [0], [0], [0])
    assert name in caught.value.message
    assert name in caught.value.metadata


@pytest.mark.parametrize(
    ("layers", "src", "dst"), [([0], [4], [0]), ([0], [0], [4]), ([0], [-1], [0]), ([1], [0], [0]), ([0], [0, 1], [0])]
)
def test_what_a_layout_does_not_have_is_refused(layers: list[int], src: list[int], dst: list[int]) -> None:
    """A block or layer out of range, or lists of unequal length, copy nothing."""
    layout = Layout(16, 4, ((Span(0, 64, 64),),))
    with pytest.raises(ValueError, match=r"lies outside|layer|source blocks"):
        make_plan(layout, layout, layers, src, dst)


def test_nothing_to_copy_is_an_empty_plan() -> None:
    """No blocks or no layers: no runs."""
    layout = Layout(16, 4, ((Span(0, 64, 64),),))
    assert len(make_plan(layout, layout, [0], [], [])) == 0
    assert make_plan(layout, layout, [], [1], [1]).total == 0


@given(cases(), st.data())
@settings(deadline=None)
def test_a_planner_is_used_again_and_again(
    case: tuple[Layout, int, Layout, int, list[int], list[int], list[int]], data: st.DataObject
) -> None:
    """What it planned before does not change what it plans next, whatever layers were asked for between."""
    src, _, dst, _, layers, sources, chosen = case
    planner = Planner(src, dst)
    between = data.draw(st.lists(st.integers(0, len(src.layers) - 1), unique=True))
    first = planner.plan(layers, sources, chosen)
    planner.plan(between, sources, chosen)
    again, fresh = planner.plan(layers, sources, chosen), make_plan(src, dst, layers, sources, chosen)
    for runs in (again, fresh):
        for name in ("src", "dst", "length"):
            assert getattr(runs, name).tolist() == getattr(first, name).tolist()
