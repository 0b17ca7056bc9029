"""The real mori: what every transport promises, and those rows of the table that a machine shows without being broken.

Needs an RDMA device and ROCm's libraries (soft-RoCE and a GPU do). Two processes of this host stand for two nodes.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from pdserve.kvd.config import MoriConfig
from pdserve.kvd.testing.mori import Row
from pdserve.kvd.transport.mori import MORI, MoriTransport
from tests.contract.kvd.mori_suite import CASES, Bench
from tests.contract.kvd.test_kvd_transports import (  # noqa: F401  # the suite, with a transport of this module
    Rig,
    rig,
    test_a_cancelled_copy_is_terminal_and_says_so,
    test_a_run_that_leaves_its_region_copies_nothing,
    test_after_close_nothing_is_written_and_nothing_waits,
    test_copies_of_one_session_keep_their_order,
    test_copies_these_bytes_and_no_others,
    test_nothing_to_copy_is_done_at_once,
    test_waiting_can_be_given_up_without_harm,
)

pytestmark = pytest.mark.hw

HOST: Final = os.environ.get("PDSERVE_MORI_HOST", "127.0.0.1")
"""Address of the RDMA device's network."""

ROWS: Final = (
    Row.NO_TCP,
    Row.NOTIFICATIONS_STAY,
    Row.OUT_OF_RANGE,
    Row.REMOTE_ERROR,
    Row.ALIVE_LIES,
    Row.SILENCE,
    Row.STALE_KEY,
    Row.SPINS,
    Row.LATE_PORT,
    Row.LAZY,
    Row.BINDS_HOST,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """mori copies in processes of its own: one way is enough."""
    if "rig" in metafunc.fixturenames:
        metafunc.parametrize("rig", ["as installed"], indirect=True)


@pytest.fixture
async def transport(rig: Rig) -> AsyncIterator[MoriTransport]:  # noqa: F811
    """On the real library."""
    made = MoriTransport(rig.arena, MoriConfig(host=HOST))
    yield made
    await made.aclose()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.lower())
async def test_a_row_holds_of_the_real_library(row: Row, tmp_path: Path) -> None:
    """As its case says."""
    await CASES[row](Bench(tmp_path, library=MORI))
