"""docs/faults.md says what the matrix and the failpoints are."""

from tests.matrix import cells, docs
from tests.matrix.cells import CANNOT


def test_the_document_is_up_to_date() -> None:
    """Faults, phases, cells that cannot happen and points are those of the code."""
    assert docs.PATH.read_text() == docs.render(), "python -m tests.matrix.docs writes it anew"


def test_every_cell_can_happen_or_has_a_reason() -> None:
    """No reason is idle, and what can happen has an expectation."""
    played = [cell for cell in cells.every() if not cells.cannot(cell)]
    idle = [
        e.because for e in CANNOT if all(next((c for c in CANNOT if c.holds(x)), None) is not e for x in cells.every())
    ]
    assert idle == []
    assert all(cells.expected(cell) for cell in played)
