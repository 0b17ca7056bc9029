"""The critical path is Jaeger's."""

import random

import pytest

from pdserve.traces import otlp
from pdserve.traces.critical import Section, path
from pdserve.traces.span import Origin, Span
from tests.unit.traces import made

ORIGIN = Origin("s", "", {})


def span(name: str, start: int, end: int, parent: str = "") -> Span:
    """A span from microsecond to microsecond."""
    return Span("t", name, parent, name, ORIGIN, start * 1000, end * 1000)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # A root alone.
        ([span("r", 0, 10)], [("r", 0, 10)]),
        # |--r--|  c is waited for, what is around it is the root's own.
        ([span("r", 0, 10), span("c", 2, 8, "r")], [("r", 8, 10), ("c", 2, 8), ("r", 0, 2)]),
        # Siblings 2 us apart: both.
        (
            [span("r", 0, 10), span("a", 0, 4, "r"), span("b", 6, 10, "r")],
            [("b", 6, 10), ("r", 4, 6), ("a", 0, 4)],
        ),
        # Siblings that touch: the one before is passed over.
        ([span("r", 0, 10), span("a", 0, 5, "r"), span("b", 5, 10, "r")], [("b", 5, 10), ("r", 0, 5)]),
        # Side by side: only the longer one.
        ([span("r", 0, 10), span("a", 1, 9, "r"), span("b", 2, 6, "r")], [("r", 9, 10), ("a", 1, 9), ("r", 0, 1)]),
        # A child that outlives its parent is cut to it.
        ([span("r", 0, 10), span("c", 8, 20, "r")], [("c", 8, 10), ("r", 0, 8)]),
        # One that begins before its parent is cut too; one outside is left out.
        ([span("r", 5, 10), span("c", 1, 7, "r"), span("o", 12, 15, "r")], [("r", 7, 10), ("c", 5, 7)]),
        # Grandchildren, and back through both levels.
        (
            [span("r", 0, 10), span("c", 2, 8, "r"), span("g", 4, 6, "c")],
            [("r", 8, 10), ("c", 6, 8), ("g", 4, 6), ("c", 2, 4), ("r", 0, 2)],
        ),
        # The caller's span is not in the store: ours is the root all the same.
        ([span("r", 0, 10, "elsewhere"), span("c", 2, 10, "r")], [("c", 2, 10), ("r", 0, 2)]),
        ([], []),
    ],
)
def test_sections(spans: list[Span], expected: list[tuple[str, int, int]]) -> None:
    """What Jaeger's page marks, last section first."""
    assert path(spans) == [Section(*one) for one in expected]


def test_every_part_of_a_request_is_on_the_path() -> None:
    """Parts leave 2 us between each other, so none hides the one before."""
    spans = otlp.decode(made.request(retried=True).export()).spans
    found = {section.span_id for section in path(spans)}
    names = {span.name for span in spans if span.span_id in found}
    assert {f"pdserve.{name}" for name, *_ in (*made.HEAD, *made.READ)} <= names


def test_any_trace_has_a_path_that_does_not_overlap() -> None:
    """Random trees, also with children outside of their parents, cycles and twice the same id: sections are disjoint,
    inside the root, and go backwards."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(300):
        spans = [span("0", 10, 90)]
        for number in range(1, dice.randrange(1, 20)):
            begin = dice.randrange(0, 100)
            parent = str(dice.randrange(0, 20))
            spans.append(span(str(number), begin, begin + dice.randrange(0, 40), parent))
        roots = [s for s in spans if s.parent_id not in {s.span_id for s in spans}]
        root = min(roots, key=lambda s: s.start_ns)
        sections = path(spans)
        assert bool(sections) == (root.duration_us > 0)
        before = root.end_ns // 1000
        for section in sections:
            assert section.start_us < section.end_us <= before
            before = section.start_us
        assert before >= root.start_us
