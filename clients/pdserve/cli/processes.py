"""One child process: its start, its log, its end; and the guard that outlives us."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from pdserve.cli.plan import Process

_GUARD = """
trap '' INT TERM HUP
groups=
while read -r group; do groups="$groups -$group"; done
[ -z "$groups" ] || kill -s TERM -- $groups 2>/dev/null
"""
"""Reads the process groups that we start; the pipe's end means that we are gone and were not able to stop them."""


_STOP_SECONDS = 5.0
"""What a process gets to stop once it has been told twice."""


class Child:
    """A running process in a session of its own, so that Ctrl-C at the terminal reaches only us."""

    def __init__(self, plan: Process, process: asyncio.subprocess.Process) -> None:
        self.plan = plan
        self._process = process
        self.stopping = False
        """Whether its end is wanted."""

    @classmethod
    async def start(cls, plan: Process) -> "Child":
        """Starts it, with stdout and stderr into its log.

        Raises:
            OSError: the program or the log folder is not there.
        """
        with plan.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *plan.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plan.env},
                start_new_session=True,
            )
        if plan.core is not None:
            # Before it has threads, so that all of them inherit it.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, {plan.core})
        return cls(plan, process)

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name

    @property
    def pid(self) -> int:
        """Of the process; also its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing where it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Drains it for up to `grace` seconds or until `hurry`, then stops it, then kills it and what it left."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        if not await self._ended_within(grace, hurry):
            self.signal(signal.SIGTERM)  # the second: stop without draining
            if not await self._ended_within(_STOP_SECONDS):
                self.signal(signal.SIGKILL)
                await self._process.wait()
        # What it started and did not end itself is in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return tail(self.plan.log, lines)

    async def _ended_within(self, seconds: float, hurry: asyncio.Event | None = None) -> bool:
        end = asyncio.ensure_future(self._process.wait())
        waits: list[asyncio.Future[Any]] = [end]
        if hurry is not None:
            waits.append(asyncio.ensure_future(hurry.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return end.done()
        finally:
            for wait in waits:
                wait.cancel()


class Guard:
    """A shell that ends the process groups it was told of, should this process vanish without doing so."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "Guard":
        """Starts it."""
        return cls(
            await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", _GUARD, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        )

    async def watch(self, child: Child) -> None:
        """Tells it of a process."""
        assert self._process.stdin is not None  # it was asked for
        self._process.stdin.write(f"{child.pid}\n".encode())
        await self._process.stdin.drain()

    async def aclose(self) -> None:
        """Dismisses it: everything has ended; safe twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def tail(path: Path, lines: int) -> str:
    """The last lines of a file that may be large; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
