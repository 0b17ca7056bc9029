"""A span's times in whole microseconds, as Jaeger counts them."""

import pytest

from pdserve.traces.span import Origin, Span


def span(start_ns: int, end_ns: int) -> Span:
    """From then to then."""
    return Span("0" * 31 + "1", "0" * 15 + "1", "", "x", Origin("s", "", {}), start_ns, end_ns)


@pytest.mark.parametrize("start", [0, 1, 499, 999, 1000, 1001, 1999])
def test_a_child_does_not_end_after_its_parent(start: int) -> None:
    """Whole microseconds of start and duration add up to those of the end, wherever in a microsecond both begin."""
    parent, child = span(0, 2001), span(start, 2001)
    assert child.start_us + child.duration_us == parent.start_us + parent.duration_us == 2
    assert span(start, start).duration_us == 0
