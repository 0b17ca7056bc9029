"""One child process: its start, its log, its end; and the guard that outlives us."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.cli import last_words
from pdserve.cli.plan import Process
from pdserve.rpc.errors import Unavailable

_GUARD = """
trap '' INT TERM HUP
watched=
while read -r pid; do
  case $pid in
    -*) left=; for one in $watched; do [ "-$one" = "$pid" ] || left="$left $one"; done; watched=$left ;;
    *) watched="$watched $pid" ;;
  esac
done
for one in $watched; do
  kill -s TERM -- "$one" 2>/dev/null || kill -s TERM -- "-$one" 2>/dev/null
done
"""
"""Reads the processes that we start, and with a minus those that have ended; the pipe's end means that we are gone and
were not able to stop them. Each drains and ends what it has started itself: an engine's core that were told too would
give up the requests that its service still answers. Only where it has gone before them are they told instead."""


_STOP_SECONDS = 5.0
"""What a process gets to stop once it has been told twice."""
_AGAIN_SECONDS = 0.25
"""Between two times that it is told: signals that come before the first was looked at are one signal."""
_CLEAR_SECONDS = 20.0
"""What killed processes get to be gone: the kernel takes its time to give much memory back."""


_LOOKED_THROUGH = 1000
"""Lines of a log in which a process may have said why it ends; behind that, only what its libraries say."""


class Child:
    """A running process in a session of its own, so that Ctrl-C at the terminal reaches only us."""

    def __init__(self, plan: Process, process: asyncio.subprocess.Process) -> None:
        self.plan = plan
        self._process = process
        self._cleared = False
        self._log_begins = 0

    @classmethod
    async def start(cls, plan: Process, *, again: bool = False) -> "Child":
        """Starts it, with stdout and stderr into its log; `again` keeps what an earlier life wrote there.

        Raises:
            OSError: the program or the log folder is not there, or the plan's core; nothing runs then.
            Unavailable: as above, and what was started does not end.
        """
        with plan.log.open("ab" if again else "wb") as log:
            begins = log.tell()
            process = await asyncio.create_subprocess_exec(
                *plan.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plan.env},
                start_new_session=True,
            )
        child = cls(plan, process)
        child._log_begins = begins
        if plan.core is not None:
            try:
                # Before it has threads, so that all of them inherit it.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, {plan.core})
            except Exception:
                await child._kill()
                raise
        return child

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
        """Drains it for up to `grace` seconds or until `hurry`, then stops it, then kills it and what it left.

        Raises:
            Unavailable: it was killed and does not end.
        """
        self.signal(signal.SIGTERM)
        if not await self._ended_within(grace, hurry) and not await self._stopped_without_draining():
            await self._kill()
        self._kill_group()

    async def clear(self) -> None:
        """Kills what it has left, once it has ended, and returns when nothing of it runs.

        Raises:
            Unavailable: something of it does not end.
        """
        self._kill_group()
        until = time.monotonic() + _CLEAR_SECONDS
        while left := list(running(self.pid)):
            if time.monotonic() > until:
                raise Unavailable(f"{self.name} has ended, and what it started does not: {', '.join(left)}")
            await asyncio.sleep(0.02)
        self._cleared = True  # from now on the number may be another's

    def how_it_ended(self) -> str:
        """In words; only once it has ended."""
        end = self.returncode or 0
        return f"was ended by signal {-end}" if end < 0 else f"ended with status {end}"

    def why_it_ended(self) -> str:
        """By its log: a sentence; empty where that does not say. Only once it has ended."""
        if (self.returncode or 0) < 0:
            return ""  # killed: what its log has last is not why
        return last_words.of(self.log_tail(_LOOKED_THROUGH))

    def log_tail(self, lines: int = 20) -> str:
        """The end of its log; nothing of an earlier life."""
        return tail(self.plan.log, lines, self._log_begins)

    async def _stopped_without_draining(self) -> bool:
        """Whether it ends once it is told a second time, and a third: in haste the second may have met the first."""
        until = time.monotonic() + _STOP_SECONDS
        while (left := until - time.monotonic()) > 0:
            self.signal(signal.SIGTERM)
            if await self._ended_within(min(left, _AGAIN_SECONDS)):
                return True
        return False

    async def _kill(self) -> None:
        self._kill_group()
        if not await self._ended_within(_CLEAR_SECONDS):
            raise Unavailable(f"{self.name} was killed and does not end")

    def _kill_group(self) -> None:
        """What it started and did not end itself is in its group."""
        if not self._cleared:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

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
    """A shell that tells the processes it was told of to drain, should this process vanish without doing so."""

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
        await self._tell(f"{child.pid}")

    async def forget(self, child: Child) -> None:
        """Tells it that nothing is left of a process, whose number another may get."""
        await self._tell(f"-{child.pid}")

    async def aclose(self) -> None:
        """Dismisses it: everything has ended; safe twice.

        Raises:
            Unavailable: it was killed and does not end.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            try:
                async with asyncio.timeout(_CLEAR_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                raise Unavailable("the guard was killed and does not end") from None
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _tell(self, word: str) -> None:
        assert self._process.stdin is not None  # it was asked for
        self._process.stdin.write(f"{word}\n".encode())
        await self._process.stdin.drain()


def running(group: int) -> Iterator[str]:
    """The processes of a group that have not ended, by name and pid; one that only waits to be reaped has."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # `pid (name) state parent group ...`; a name may have spaces and brackets.
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state not in "ZX":
            yield f"{name.partition('(')[2]} ({stat.parent.name})"


def tail(path: Path, lines: int, begins: int = 0) -> str:
    """The last lines of a file that may be large, from byte `begins` on; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(begins, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
