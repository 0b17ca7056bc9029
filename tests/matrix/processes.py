"""Real processes that start in milliseconds: the zygote seen from the tests, and its children."""

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_START_S = 20.0
_GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to be."""

    program: str
    """One of zygote.PROGRAMS."""
    argv: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    """Appended to by every process of this name."""
    planted: str = ""
    """A bug out of planted.py that is put in before the program starts."""


class Process:
    """A child of the zygote, held by its pidfd: its number may be another's once it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a stopped one lives."""
        return not select.select([self._fd], [], [], 0)[0]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    async def kill(self) -> None:
        """Ends it as a crash would, and waits for that."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self, seconds: float = _GONE_S) -> None:
        """Waits for its end.

        Raises:
            TimeoutError: it lives on.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._fd)


class Zygote:
    """See zygote.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "Zygote":
        """Starts it; the imports go on while the first order waits."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.matrix.zygote",
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return cls(process)

    async def spawn(self, order: Order) -> Process:
        """A new process.

        Raises:
            RuntimeError: the zygote has died.
            ProcessLookupError: the process has ended already; its log says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = {
            "program": order.program,
            "argv": list(order.argv),
            "environ": dict(order.environ),
            "log": str(order.log),
            "planted": order.planted,
        }
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        async with asyncio.timeout(_START_S):
            answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the zygote has ended ({self._process.returncode})")
        return Process(json.loads(answer)["pid"])

    async def aclose(self) -> None:
        """Ends it and with it whatever it has started."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
