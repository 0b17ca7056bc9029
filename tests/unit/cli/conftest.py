"""Where a deployment of fakes lives, and the board it is shown on."""

import io
from pathlib import Path

import pytest

from pdserve.cli.board import Board


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def board(out: io.StringIO) -> Board:
    return Board(out, terminal=False)
