"""The daemon as a process of its own."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pdserve.kvd.config import INSECURE_LOOPBACK_KEY
from pdserve.runtime.signing import Signer

_START_S = 20.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class KvdProcess:
    """A daemon that was ready."""

    process: asyncio.subprocess.Process
    socket: str
    """The path of its gRPC socket."""
    ready: str
    """The line that said so."""
    log: Path
    """What it wrote to stderr."""

    @property
    def signer(self) -> Signer:
        """Signs under the key that a daemon without one has."""
        return Signer(INSECURE_LOOPBACK_KEY)


@contextlib.asynccontextmanager
async def kvd_process(state_dir: Path, *flags: str, within: float = _START_S) -> AsyncIterator[KvdProcess]:
    """Starts `python -m pdserve.kvd`, waits until it is ready, at most `within` seconds, and ends it.

    Raises:
        RuntimeError: it did not become ready; with what it wrote.
    """
    log = state_dir / "kvd.log"
    environ = {name: value for name, value in os.environ.items() if name != "PDSERVE_CLUSTER_KEY_FILE"}
    with _opened(log) as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdserve.kvd", "--state-dir", str(state_dir), *flags, stderr=stderr, env=environ
        )
    try:
        ready = await _ready(process, log, within)
        yield KvdProcess(process, str(state_dir / "kvd.sock"), ready, log)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.wait_for(process.wait(), _STOP_S)


def _opened(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("wb")


async def _ready(process: asyncio.subprocess.Process, log: Path, within: float) -> str:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while True:
        said = await asyncio.to_thread(log.read_text)
        for line in said.splitlines():
            if "kvd_ready" in line:
                return line
        if process.returncode is not None or loop.time() > deadline:
            raise RuntimeError(f"kvd did not become ready (exit {process.returncode}):\n{said}")
        await asyncio.sleep(0.02)
