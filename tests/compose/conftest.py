"""The checks of deploy/compose. `python -m tests.compose` brings what they need; without it they fail and say so.

Two pytest processes share them, file by file, so each file has a deployment of its own where it needs one.
"""

import asyncio
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from tests.compose.deployment import NO_JAEGER, Deployment


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that checks have printed, and the closing line."""
    for report in terminalreporter.getreports("passed"):
        for line in report.capstdout.splitlines():
            if line.startswith("compose: "):
                print(f"\n{line}", end="")
    by_end = {end: {r.nodeid for r in terminalreporter.getreports(end)} for end in ("passed", "failed", "error")}
    bad = by_end["failed"] | by_end["error"]
    print(f"\ncompose: {len(by_end['passed'] | bad)} checks, {len(by_end['passed'] - bad)} passed")


def _brought(variable: str) -> Path:
    path = os.environ.get(variable, "")
    assert path, "`make test-compose` runs these: it brings an engine and docker compose"
    return Path(path)


@pytest.fixture(scope="session")
def compose() -> Path:
    """docker compose."""
    return _brought("PDSERVE_COMPOSE")


@pytest.fixture(scope="session")
def images(compose: Path) -> None:
    """pdserve:test and pdserve-bench:test, built without a network; once a run, by the process that comes first."""
    run = _brought("PDSERVE_COMPOSE_RUN")
    built = run / "images-are-built"
    with (run / "lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="pdserve-key-") as name:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            made = Deployment.make(Path(name), "pdserve-test", (NO_JAEGER,))
            made.env["PDSERVE_COMPOSE"] = str(compose)
            asyncio.run(made.compose("--profile", "bench", "build", timeout=600))
            built.touch()
