"""A pattern at many places, against the list of all its runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvd.plan import Planner
from pdserve.kvd.runs import Repeated, Runs, leaves, once
from pdserve.kvd.transport.device.parts import aligned, batches, surely_inside
from pdserve.kvd.types import Layout, Span

SIZE = 1 << 16


def column(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """One of a list of runs."""
    return np.array(values, np.uint64)


def ranges(runs: Runs) -> list[tuple[int, int]]:
    """Every byte's source and destination."""
    columns = runs.src.tolist(), runs.dst.tolist(), runs.length.tolist()
    return sorted((at + i, to + i) for at, to, n in zip(*columns, strict=True) for i in range(n))


def spelled(runs: Repeated) -> list[tuple[int, int]]:
    """The same, place by place."""
    pattern, places = runs.pattern, zip(runs.src_at.tolist(), runs.dst_at.tolist(), strict=True)
    return sorted((at + a, to + b) for at, to in places for a, b in ranges(pattern))


@st.composite
def patterns(draw: st.DrawFn) -> Repeated:
    """Small ones, of unequal runs, anywhere."""
    numbers = st.integers(0, SIZE // 32)
    runs = draw(st.lists(st.tuples(numbers, numbers, st.integers(1, 12)), min_size=1, max_size=4))
    places = draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
    pattern = Runs(*(column(*(16 * one[i] for one in runs)) for i in range(3)))
    return Repeated(pattern, *(column(*(16 * one[i] for one in places)) for i in range(2)))


@given(patterns())
@settings(deadline=None, max_examples=50)
def test_a_pattern_is_the_list_of_its_runs_at_each_place(runs: Repeated) -> None:
    """Whoever asks for lists gets every byte of every place; the bytes are counted without them."""
    assert runs.total == len(spelled(runs))
    assert ranges(runs) == spelled(runs)
    assert runs.listed() is runs
    assert once(runs) is runs
    plain = Runs(runs.src, runs.dst, runs.length)
    assert spelled(once(plain)) == ranges(plain)


@given(patterns(), st.sampled_from([16, 192, 600, 1 << 20]), st.sampled_from([16, 64, 1 << 20]))
@settings(deadline=None, max_examples=50)
def test_batches_of_a_pattern_hold_its_bytes_and_no_more_than_they_may(runs: Repeated, most: int, longest: int) -> None:
    """Cut between places first, and within the pattern where one place is too much; a batch of more is one run."""
    parts = list(batches(runs, most, longest))
    assert sorted(byte for part in parts for byte in spelled(once(part))) == spelled(runs)
    for part in map(once, parts):
        assert part.total <= most or (len(part.pattern), len(part.src_at)) == (1, 1)
        assert int(part.pattern.length.max()) <= longest


@given(patterns(), st.integers(0, SIZE // 16), st.integers(0, SIZE // 16))
@settings(deadline=None, max_examples=50)
def test_a_pattern_that_leaves_a_region_is_told_from_one_that_does_not(runs: Repeated, src: int, dst: int) -> None:
    """Exactly, up to the last byte, and without its lists."""
    sizes = 16 * src, 16 * dst
    inside = all(at < sizes[0] and to < sizes[1] for at, to in spelled(runs))
    assert surely_inside(runs, *sizes) == inside
    assert inside != (leaves(runs.src, runs.length, sizes[0]) or leaves(runs.dst, runs.length, sizes[1]))


@pytest.mark.parametrize("at", range(5))
def test_one_odd_number_anywhere_is_not_aligned(at: int) -> None:
    """In the pattern's sources, destinations or lengths, or in the places."""
    columns = [column(16, 32) for _ in range(5)]
    assert aligned(Repeated(Runs(*columns[:3]), *columns[3:]))
    columns[at] = column(16, 40)
    assert not aligned(Repeated(Runs(*columns[:3]), *columns[3:]))


def _layered(layers: int, other: int = 64) -> Layout:
    """K and V apart, blocks of 64 bytes but for the last layer's `other`."""
    spans = [tuple(Span((2 * layer + i) * 1024, 64, 64) for i in range(2)) for layer in range(layers - 1)]
    last = tuple(Span((2 * layers - 2 + i) * 1024, other, other) for i in range(2))
    return Layout(16, 8, (*spans, last))


def test_a_prompt_in_layers_that_are_alike_is_a_pattern() -> None:
    """Of as many runs as one span has, at a place for each span; of unlike layers, or in one span, it is a list."""
    blocks = [0, 1, 4], [5, 6, 2]
    runs = Planner(_layered(3), _layered(3)).plan([0, 2], *blocks)
    assert isinstance(runs, Repeated)
    assert runs.pattern.src.tolist() == [0, 256]
    assert runs.src_at.tolist() == [0, 1024, 4096, 5120]
    assert not isinstance(Planner(_layered(3, 32), _layered(3, 32)).plan([0, 2], *blocks), Repeated)
    single = Layout(16, 8, ((Span(0, 64, 64),), (Span(1024, 64, 64),)))
    assert not isinstance(Planner(single, single).plan([1], *blocks), Repeated)
