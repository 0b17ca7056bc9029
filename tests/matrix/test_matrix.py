"""Every phase of a request, struck by every fault, in both modes."""

from collections.abc import Callable

import pytest

from tests.matrix import cells
from tests.matrix.case import Alone, run
from tests.matrix.cells import Cell
from tests.matrix.checks import findings
from tests.matrix.fleet import Fleet
from tests.matrix.played import AGAIN

CELLS = [cell for cell in cells.every() if not cells.cannot(cell)]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_cell(fleet: Fleet, alone: Alone, cell: Cell, record_property: Callable[[str, object], None]) -> None:
    """One typed answer in time, every block back, no wrong token, the next request served, the cause on record."""
    seen = await run(fleet, cell, alone)
    if seen.again:
        record_property(AGAIN, seen.again)
    found = findings(cell, seen)
    assert not found, "\n".join([str(cell), *found, fleet.tails()])
