"""One process that draws (child.py), as the proxy has it: from its start to its end, and whose spans it owes us.

The socket between us keeps messages whole (SOCK_SEQPACKET): a record is in it altogether or not at all, and the kernel
bounds how much of them waits there. So a record that finds no room is known at once, and nothing of ours waits.
"""

import asyncio
import contextlib
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import Final, Self

import msgspec
import structlog

from pdserve.proxy.tracing.wire import LARGEST, Report, unpack_report

log = structlog.get_logger(__name__)

ROOM: Final = 1 << 20
"""Bytes of records that may wait in the socket, as the kernel counts; it may allow less (net.core.wmem_max): with its
own default, that is a hundred usual records, and with all of it four hundred."""
_LAST_S: Final = 1.0
"""Seconds that a process gets to end once it has closed its socket."""


class Process:
    """A handle; `kill` and `finish` are safe at any time. On one loop."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.report = Report()
        """Its last."""
        self.ready = False
        """It has said one."""
        self._process = process
        self._sock = sock
        self.full = False
        """There was no room for the last record."""
        self._loop = asyncio.get_running_loop()
        self._owed: deque[tuple[int, float]] = deque()
        """Spans of each record that it has been given and is not through with, and when that was; the oldest first."""
        self._through = 0
        """Records that it is through with."""
        self._silent = asyncio.Event()
        """It has closed its socket."""
        self._loop.add_reader(sock, self._hear)

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Self:
        """Starts it; of our files it gets stderr and its end of the socket, for its stdin.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
            process = await asyncio.create_subprocess_exec(*argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            stack.pop_all()
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def able(self) -> bool:
        """It has said that it is there, and not that it cannot draw."""
        return self.ready and not self.report.refused

    @property
    def unread(self) -> int:
        """Records that it has been given and is not through with."""
        return len(self._owed)

    @property
    def waiting(self) -> float:
        """Seconds since it was given the oldest of those."""
        return self._loop.time() - self._owed[0][1] if self._owed else 0.0

    @property
    def owed(self) -> int:
        """Spans that were given to it, or that it drew, and of which it has not said what became."""
        said = self.report
        return sum(spans for spans, _ in self._owed) + said.spans - said.exported - said.dropped - said.failed

    def give(self, parcel: bytes, spans: int) -> bool:
        """Whether it has the record now, of at most so many spans; not where there is no room, or where it is gone."""
        if len(parcel) > LARGEST:
            return False
        try:
            self._sock.send(parcel)
        except OSError as error:
            self.full = isinstance(error, BlockingIOError)
            return False
        self.full = False
        self._owed.append((spans, self._loop.time()))
        return True

    def finish(self) -> None:
        """There will be no more records."""
        with contextlib.suppress(OSError):  # it is gone
            self._sock.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> int:
        """Waits until it has ended and has been heard to the last; its exit status, negative for a signal. One that is
        no longer waited for is killed."""
        try:
            await self._silent.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _LAST_S)
        finally:
            self.kill()
            status = await self._process.wait()
            self._hear_no_more()
            self._sock.close()
        return status

    def _hear(self) -> None:
        """Takes in what it has said."""
        while True:
            try:
                said = self._sock.recv(LARGEST)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once, where it has died with records unread: its last reports come after
            if not said:
                self._hear_no_more()
                return
            try:
                self._take(unpack_report(said))
            except msgspec.MsgspecError as error:
                log.error("traces_not_understood", error=str(error))
                self.kill()

    def _take(self, report: Report) -> None:
        self.report, self.ready = report, True
        if report.drawn - self._through > len(self._owed):
            log.error("traces_not_understood", error=f"{report.drawn} drawn of {self._through + len(self._owed)}")
            self.kill()
            return
        for _ in range(report.drawn - self._through):
            self._owed.popleft()
        self._through = report.drawn

    def _hear_no_more(self) -> None:
        if not self._silent.is_set():
            self._loop.remove_reader(self._sock)
            self._silent.set()
