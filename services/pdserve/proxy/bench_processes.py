"""Processes of the proxy's benchmarks: started, waited for, watched, and killed at the end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

START_S = 30.0
"""Longest wait for a process to listen, and for engines to be routable; the machine may be busy."""


@contextlib.asynccontextmanager
async def process(*words: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[int]:
    """`python -m` with these words and, of OpenTelemetry's variables, these alone; its id. Killed at the end."""
    # What the caller's shell says of telemetry would be measured too.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *words, env=ours | dict(environ or {}))
    try:
        yield child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        await child.wait()


async def listening(address: str) -> None:
    """Waits until somebody takes connections there.

    Raises:
        TimeoutError: nobody does.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken, without its children."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that it has started, which run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if entry.name.isdecimal() and int(_stat(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
    return found


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
