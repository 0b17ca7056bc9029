"""A plan in slices, against the same plan as a whole."""

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvd import plan, runs
from pdserve.kvd.plan import Bounds, Planner, Runs
from pdserve.kvd.reshard import match
from pdserve.kvd.slices import cut
from pdserve.kvd.testing import plain_layout
from tests.unit.kvd.sides import contents, sides


@given(st.integers(0, 6), st.integers(0, 30), st.integers(1, 9), st.integers(1, 60))
def test_each_unit_of_each_layer_is_in_one_slice_of_bounded_size(layers: int, units: int, each: int, most: int) -> None:
    """Whatever the sizes: nothing twice, nothing left out, layer by layer, and no slice of more pieces than was asked
    for unless a single unit has more."""
    met = []
    for part in cut(layers, units, each, most):
        inside = [(layer, unit) for layer in range(layers)[part.layers] for unit in range(units)[part.units]]
        assert inside
        assert len(inside) * each <= most or len(inside) == 1
        met += inside
    assert met == [(layer, unit) for layer in range(layers) for unit in range(units)]


def test_few_pieces_are_one_slice() -> None:
    """Layers are not taken one by one where all of them fit; a layer that does not is cut between its units."""
    assert [(p.layers, p.units) for p in cut(4, 10, 2, 80)] == [(slice(0, 4), slice(0, 10))]
    assert len(list(cut(4, 10, 2, 79))) == 2
    assert len(list(cut(4, 10, 2, 19))) == 4 * 2


def moves(*several: Runs) -> Counter[tuple[int, int]]:
    """Every byte's way, and how often it is taken."""
    found: Counter[tuple[int, int]] = Counter()
    for one in several:
        for at, to, length in zip(one.src.tolist(), one.dst.tolist(), one.length.tolist(), strict=True):
            found.update((at + i, to + i) for i in range(length))
    return found


@given(st.data())
@settings(deadline=None, max_examples=60, print_blob=True)
def test_slices_together_are_the_plan(data: st.DataObject) -> None:
    """Of whatever two layouts, from whichever unit on: byte for byte, in slices no longer than was asked for."""
    content = data.draw(contents())
    src, dst = data.draw(sides(content)), data.draw(sides(content))
    pair = match(src.layouts, dst.layouts)
    ours = data.draw(st.permutations(range(src.num_blocks)))
    theirs = data.draw(st.permutations(range(dst.num_blocks)))
    last = min(len(ours) * pair.src_units, len(theirs) * pair.dst_units)
    low = data.draw(st.integers(0, last - 1))
    units = range(low, data.draw(st.integers(low + 1, last)))
    layers = data.draw(st.lists(st.integers(0, pair.layers - 1), unique=True, min_size=1))
    most = data.draw(st.integers(1, 40))
    bounds = Bounds(0, most)
    for share in pair.shares:
        with mock.patch.object(plan, "DIVIDED", bounds), mock.patch.object(plan, "WHOLE", bounds):
            planner = Planner(src.layouts[share.src_rank], dst.layouts[share.dst_rank], share)
        a, b = [ours[u // pair.src_units] for u in units], [theirs[u // pair.dst_units] for u in units]
        whole = planner.plan(layers, a, b, low)
        slices = list(planner.slices(layers, a, b, low))
        assert moves(*slices) == moves(whole)
        assert all(0 < len(part) <= max(most, planner.each) for part in slices)
        assert not planner.quick(1, 1)


def test_slices_are_made_when_they_are_asked_for() -> None:
    """And what cannot be planned is refused before the first, however late in the prompt it lies."""
    layout = plain_layout(4096, layers=64)
    with mock.patch.object(plan, "WHOLE", Bounds(1024, 1024)):
        planner = Planner(layout, layout)
    blocks = list(range(0, 4096, 2))
    assert planner.quick(16, 64)
    assert not planner.quick(17, 64)
    with mock.patch.object(plan, "merge", wraps=runs.merge) as made:
        slices = planner.slices(range(64), blocks, blocks)
        made.assert_not_called()
        first = next(slices)
        assert (made.call_count, len(first)) == (1, 1024)
        with pytest.raises(ValueError, match="source block"):
            planner.slices(range(64), [*blocks, 4096], [*blocks, 4095])
        with pytest.raises(ValueError, match="layer 64"):
            planner.slices(range(65), blocks, blocks)
        assert made.call_count == 1
    assert sum(len(part) for part in slices) == 64 * 2048 - 1024
    assert list(planner.slices([], blocks, blocks)) == list(planner.slices([0], [], [])) == []
