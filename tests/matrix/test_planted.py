"""The matrix finds bugs: each planted one turns it red."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from pdserve.rpc.errors import PdserveError
from tests.forked.forks import Zygote
from tests.matrix import cells
from tests.matrix.case import Alone, run
from tests.matrix.checks import defects, findings
from tests.matrix.fleet import running
from tests.matrix.logs import Log
from tests.matrix.planted import PLANTED


def everything_logged(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """By all members that had their logs there."""
    return [(path.stem, event) for path in sorted(folder.glob("*.log")) for event in Log(path).events()]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("bug", PLANTED)
async def test_a_planted_bug_is_found(bug: str, alone: Alone, zygote: Zygote) -> None:
    """With the finding that one expects of it; without it the same cells are part of the matrix, and hold."""
    planted, found = PLANTED[bug], []
    assert not [str(cell) for cell in planted.cells if cells.cannot(cell)]
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        try:
            async with running(zygote, Path(folder), bug) as fleet:
                for cell in planted.cells:
                    found += findings(cell, await run(fleet, cell, alone))
        except (AssertionError, PdserveError) as broken:  # it did not even come to an end
            found.append(str(broken))
        found += defects(everything_logged(Path(folder)))
    print(bug, *found, sep="\n  ")
    assert found, f"{bug}: nobody noticed"
    assert [finding for finding in found if planted.finding in finding], found
