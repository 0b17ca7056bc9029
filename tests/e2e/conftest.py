"""`pdserve up` as a user starts it: a process that starts all others, found by its state folder."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.cli import deployment
from pdserve.cli.deployment import Deployment
from pdserve.client import ConfigError

PDSERVE = (sys.executable, "-m", "pdserve.cli")
START_S, END_S = 150.0, 60.0
"""Longest waits for a deployment to be ready and to be gone, on a machine that does other things too."""


@dataclass(frozen=True)
class Up:
    """A running `pdserve up`."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    out: Path
    """What it writes."""

    def ready(self) -> Deployment:
        """What up.json says, once the deployment is ready."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return deployment.find(self.state_dir)
            except ConfigError:
                assert self.process.poll() is None, self.out.read_text()
                assert time.monotonic() < deadline, self.out.read_text()
                time.sleep(0.1)

    def end(self, number: signal.Signals) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def left(self, record: Deployment) -> list[str]:
        """Names of its processes that still run, those too whose parent has died: each was started in a process
        group of its own."""
        groups, found = set(record.processes.values()), []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                # `pid (name) state parent group ...`; a name may have spaces and brackets.
                name, _, rest = stat.read_text().rpartition(")")
            except OSError:
                continue  # it has just ended
            state, _, group = rest.split()[:3]
            if int(group) in groups and state != "Z":
                found.append(f"{name})")
        return found

    def command(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a sub-command that finds this deployment by its folder."""
        words = (*PDSERVE, *words, "--state-dir", str(self.state_dir))
        return subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=END_S, check=False)


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Up]]:
    """`launch(flags)` starts a deployment on free ports in a folder of its own. Whoever does so ends it; what was
    not ended is killed at the session's end, and a `pdserve up` that is killed takes the rest with it."""
    started: list[Up] = []

    def one(*flags: str) -> Up:
        # Not tmp_path: it can be too long for a Unix socket.
        folder = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
        ports = () if "--proxy" in flags else ("--grpc-port", "0", "--http-port", "0")
        ours = (*ports, "--state-dir", str(folder))
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen(
                [*PDSERVE, "up", *ours, *flags],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        started.append(Up(process, folder, folder / "out"))
        return started[-1]

    try:
        yield one
    finally:
        for up in started:
            up.process.kill()
            up.process.wait(END_S)
            if not os.environ.get("PDSERVE_TEST_KEEP"):  # set it to read the logs of a run
                shutil.rmtree(up.state_dir, ignore_errors=True)  # what was killed may be removing its sockets too
