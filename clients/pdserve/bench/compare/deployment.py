"""One `pdserve up`: started, found by its up.json, ended on every way out.

It runs in a session of its own, so that Ctrl-C at the terminal reaches only us. Should we be killed, a small shell that
reads a pipe of ours ends it.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdserve.rpc.errors import Unavailable

_GUARD = 'trap "" INT TERM HUP; read -r said || kill -s TERM "$1" 2>/dev/null'
"""A line means that it has ended; the pipe's end without one means that we have."""
_POLL = 0.2
"""Seconds between two looks at what is not ready yet."""
_DRAIN, _HURRY = 45.0, 15.0
"""Seconds to end after the first signal, and after the second; then it is killed, and its own guard ends the rest."""
_TAIL = 4000
"""Characters of its output that an error repeats."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A deployment that serves."""

    grpc: str
    """Target of its proxy."""
    kvd: str
    """gRPC target of its kvd."""
    processes: Mapping[str, int]
    """Process ids by name, with `up`, which keeps them."""
    after: float
    """Seconds that it took."""


class Deployment:
    """An async context manager that leaves no process behind."""

    def __init__(self, words: Callable[[Path], tuple[str, ...]], timeout: float, logs: Path) -> None:
        """`words`: what follows `pdserve`, for a state folder; `logs`: where the logs of a failed one are kept."""
        # Not a folder of the user's: a socket's path must be short.
        self._state = Path(tempfile.mkdtemp(prefix="pdsc-", dir="/tmp"))
        try:
            self.command = ("pdserve", *words(self._state))
        except BaseException:
            self._state.rmdir()
            raise
        self._timeout = timeout
        self._logs = logs
        self._process: asyncio.subprocess.Process | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self.hurry = asyncio.Event()
        """Set to end it at once."""

    async def start(self) -> Ready:
        """Starts it and waits until it serves.

        Raises:
            Unavailable: it ended, or was not ready in time; with the end of its output, which has that of the log.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with self._out.open("wb") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdserve.cli", *self.command[1:],
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._guard = await asyncio.create_subprocess_exec(
            "sh", "-c", _GUARD, "guard", str(self._process.pid), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            # `up` has the same deadline and says what was not ready; ours is for one that hangs.
            async with asyncio.timeout(self._timeout + 30):
                while not (record := self._record()):
                    if self._process.returncode is not None:
                        raise Unavailable(self._failed("did not start"))
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            raise Unavailable(self._failed(f"was not ready within {self._timeout:g} s")) from None
        return Ready(
            record["grpc"], record["kvd"], record["processes"] | {"up": self._process.pid}, loop.time() - begun
        )

    async def check(self, seconds: float) -> None:
        """Gives it `seconds` to end by itself.

        Raises:
            Unavailable: it has: a process of it died; with the end of its output.
        """
        if self._process is not None:
            await self._ended(self._process, seconds)
            if self._process.returncode is not None:
                raise Unavailable(self._failed("ended by itself"))

    async def aclose(self) -> None:
        """Drains it, then hurries it, then kills it; safe twice."""
        process, self._process = self._process, None
        if process is not None:
            for number, seconds in ((signal.SIGINT, _DRAIN), (signal.SIGINT, _HURRY), (signal.SIGKILL, _HURRY)):
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(number)
                    await self._ended(process, seconds)
        if self._guard is not None:
            guard, self._guard = self._guard, None
            with contextlib.suppress(ProcessLookupError, BrokenPipeError, ConnectionResetError):
                await guard.communicate(b"ended\n")
        shutil.rmtree(self._state, ignore_errors=True)  # a killed one may still be removing its sockets

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second cancellation must not leave processes behind: it only makes the end quicker.
        closing = asyncio.ensure_future(self.aclose())
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                if closing.cancelled():
                    raise
                self.hurry.set()

    @property
    def _out(self) -> Path:
        return self._state / "out"

    async def _ended(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        waits = [asyncio.ensure_future(process.wait())]
        if not self.hurry.is_set():
            waits.append(asyncio.ensure_future(self.hurry.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _record(self) -> Any:
        """What up.json says; None: it is not there yet."""
        try:
            return json.loads((self._state / "up.json").read_text())
        except FileNotFoundError:
            return None

    def _failed(self, what: str) -> str:
        """The sentence with the end of the output; the logs are copied to where they are kept."""
        said = self._out.read_text(errors="replace")[-_TAIL:] if self._out.exists() else ""
        kept = ""
        with contextlib.suppress(OSError):
            shutil.copytree(self._state / "logs", self._logs, dirs_exist_ok=True)
            kept = f"; its logs are in {self._logs}"
        return f"the deployment {what}{kept}: {' '.join(self.command)}\n{said.rstrip()}"
