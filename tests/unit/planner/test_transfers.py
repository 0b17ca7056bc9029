"""How transfers share links: each gets its part, and bytes are conserved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.planner.simulator.links import Flow, Links


def drain(links: Links) -> dict[int, float]:
    """When each transfer ends."""
    ends = {}
    while (at := links.next_end()) is not None:
        for flow in links.ended(at):
            ends[flow.request] = at
    return ends


def test_a_link_is_shared_evenly() -> None:
    """100 and 300 bytes at 100 bytes a second out of one engine: 2 s, and 2 s more alone."""
    links = Links(100.0)
    links.add(0.0, Flow(0, 0, producer=0, consumer=1, left=100.0))
    links.add(0.0, Flow(1, 0, producer=0, consumer=2, left=300.0))
    assert drain(links) == pytest.approx({0: 2.0, 1: 4.0})


def test_a_late_one_takes_its_share_from_then_on() -> None:
    """The first has moved 100 of its 200 bytes when another comes to the same consumer."""
    links = Links(100.0)
    links.add(0.0, Flow(0, 0, producer=0, consumer=2, left=200.0))
    links.add(1.0, Flow(1, 0, producer=1, consumer=2, left=50.0))
    assert drain(links) == pytest.approx({1: 2.0, 0: 2.5})


def test_what_is_given_up_frees_its_share() -> None:
    """From then on the other has the whole link."""
    links = Links(100.0)
    links.add(0.0, Flow(0, 0, producer=0, consumer=1, left=100.0))
    links.add(0.0, Flow(1, 0, producer=0, consumer=1, left=100.0))
    links.drop(1.0, 1)
    assert drain(links) == pytest.approx({0: 1.5})
    assert len(links) == 0


@given(
    sizes=st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 2), st.integers(3, 5), st.floats(1, 1e6)), min_size=1, max_size=12
    )
)
def test_all_end_and_no_byte_is_lost(sizes: list[tuple[float, int, int, float]]) -> None:
    """Whatever comes when: every transfer ends, none faster than alone, and all bytes are counted."""
    links, ends, rate = Links(1000.0), {}, 1000.0
    waiting = sorted(enumerate(sizes), key=lambda item: item[1][0])
    while waiting or len(links):
        at = links.next_end()
        if waiting and (at is None or waiting[0][1][0] <= at):
            index, (begin, producer, consumer, size) = waiting.pop(0)
            links.add(begin, Flow(index, 0, producer, consumer, size))
        elif at is not None:
            for flow in links.ended(at):
                ends[flow.request] = at
    assert len(ends) == len(sizes)
    for index, (begin, _, _, size) in enumerate(sizes):
        assert ends[index] >= begin + size / rate * (1 - 1e-9)
    assert links.moved == pytest.approx(sum(size for *_, size in sizes))
