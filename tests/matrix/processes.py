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
"""The zygote's imports are within it."""
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
    """See zygote.py. It starts with its first order, and anew after an exchange that broke off."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def spawn(self, order: Order) -> Process:
        """A new process.

        Raises:
            RuntimeError: the zygote has died.
            ProcessLookupError: the process has ended already; its log says why.
        """
        line = {
            "program": order.program,
            "argv": list(order.argv),
            "environ": dict(order.environ),
            "log": str(order.log),
            "planted": order.planted,
        }
        async with self._turn:
            try:
                pid = await self._ask(json.dumps(line).encode() + b"\n")
            except BaseException:
                await self.aclose()  # the next order would be given this one's answer
                raise
        return Process(pid)

    async def aclose(self) -> None:
        """Ends it and with it whatever it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _ask(self, line: bytes) -> int:
        """The number of the process that was ordered."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.matrix.zygote",
                cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        async with asyncio.timeout(_START_S):
            answer = await process.stdout.readline()
        if not answer:
            raise RuntimeError("the zygote has ended")
        return int(json.loads(answer)["pid"])
