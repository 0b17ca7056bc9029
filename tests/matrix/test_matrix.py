"""Every phase of a request, struck by every fault, in both modes."""

import pytest

from tests.matrix import cells
from tests.matrix.case import Alone, run
from tests.matrix.cells import Cell
from tests.matrix.checks import findings
from tests.matrix.fleet import Fleet

CELLS = [cell for cell in cells.every() if not cells.cannot(cell)]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_cell(fleet: Fleet, alone: Alone, cell: Cell) -> None:
    """One typed answer in time, every block back, no wrong token, the next request served, the cause on record."""
    found = findings(cell, await run(fleet, cell, alone))
    assert not found, "\n".join([str(cell), *found, fleet.tails()])
