"""The checks of deploy/compose. `python -m tests.compose` brings what they need; without it they fail and say so."""

import os
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The closing line."""
    by_end = {end: {r.nodeid for r in terminalreporter.getreports(end)} for end in ("passed", "failed", "error")}
    bad = by_end["failed"] | by_end["error"]
    print(f"\ncompose: {len(by_end['passed'] | bad)} checks, {len(by_end['passed'] - bad)} passed")


@pytest.fixture(scope="session")
def compose() -> Path:
    """docker compose."""
    path = os.environ.get("PDSERVE_COMPOSE", "")
    assert path, "`make test-compose` runs these: it brings an engine and docker compose"
    return Path(path)
