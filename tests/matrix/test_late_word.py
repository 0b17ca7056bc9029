"""Prefill's word to the proxy comes late: a phase that lies behind it is not there before it has come."""

import pytest

from pdserve.runtime.failpoints import Point
from tests.matrix.case import Alone, run
from tests.matrix.cells import Cell
from tests.matrix.checks import findings
from tests.matrix.faults import Fault
from tests.matrix.fleet import Fleet
from tests.matrix.phases import Phase

CELLS = [
    Cell(phase, fault, "write")
    for phase in (Phase.NOTICE, Phase.FIRST_STEP, Phase.STREAMING)
    for fault in (Fault.P_STOPPED, Fault.P_KILLED)
]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_word_that_comes_late(fleet: Fleet, alone: Alone, cell: Cell) -> None:
    """In WRITE decode has every byte before the proxy knows of the offer. A prefill that is lost in between is a
    failed attempt; the cells are about one that is lost after it."""
    for name in ("prefill-0", "prefill-1"):
        await fleet.members[name].failpoints.arm(Point.PREFILL_READY, "delay(250)")
    found = findings(cell, await run(fleet, cell, alone))
    assert not found, "\n".join([str(cell), *found, fleet.tails()])
