"""Every row of what is known of mori: the fake does it, the transport lives with it, and the suite would notice."""

from pathlib import Path

import pytest

from pdserve.kvd.testing.mori import Row
from pdserve.kvd.transport.mori_process import Library
from tests.contract.kvd.mori_suite import CASES, Bench


def test_every_row_has_a_case() -> None:
    """And no case is of something else."""
    assert set(CASES) == set(Row)


PLACES = pytest.mark.parametrize("hosted", [False, True], ids=["in kvd's processes", "in ranks'"])
ROWS = pytest.mark.parametrize("row", Row, ids=lambda row: row.name.lower())


@PLACES
@ROWS
async def test_a_row_holds(row: Row, hosted: bool, tmp_path: Path, forked: Library) -> None:
    """As the case says: what the fake does, and what becomes of it, wherever mori lives."""
    await CASES[row](Bench(tmp_path, forked, hosted=hosted))


@PLACES
@ROWS
async def test_a_fake_without_the_row_fails_its_case(row: Row, hosted: bool, tmp_path: Path, forked: Library) -> None:
    """Negative control: each row is one that its case depends on."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await CASES[row](Bench(tmp_path, forked, off=row, hosted=hosted))
