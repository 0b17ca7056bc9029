"""Processes that start in milliseconds: the zygote seen from the tests, and its children."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.kvd.transport.start import Command
from tests.contract.kvd.zygote import MESSAGE_BYTES, ROOM, Bury, Fork

_ROOT = Path(__file__).resolve().parents[3]
_ANSWER_S = 20.0
"""The zygote's imports are within it."""


class Zygote:
    """See zygote.py. Its `start` is a `transport.start.Start`. It starts with its first order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(_ANSWER_S)

    async def start(self, command: Command) -> "Forked":
        """A new process. Blocks for milliseconds, so that whoever asks cannot go away in the middle.

        Raises:
            OSError: the zygote has died, or does not answer.
        """
        fork = Fork(command.module, command.args, dict(command.env))
        return Forked(self, self.ask(fork, [*command.fds, command.words]))

    def ask(self, what: Fork | Bury, fds: Sequence[int] = ()) -> int:
        """An order's answer. Raises OSError."""
        if self._process is None:
            number = self._theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.kvd.zygote", str(number), "." * ROOM],
                pass_fds=[number],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not be in a fork
            )
            self._theirs.close()
        socket.send_fds(self._orders, [msgspec.msgpack.encode(what)], fds)
        answer = self._orders.recv(MESSAGE_BYTES)
        if not answer:
            raise OSError(f"the zygote has ended ({self._process.poll()})")
        return msgspec.msgpack.decode(answer, type=int)

    def close(self) -> None:
        """Ends it, and with it whatever it has started."""
        self._orders.close()
        self._theirs.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Forked:
    """See transport.start.Process."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    async def wait(self) -> int:
        """See Process. Not for two at once."""
        if self._status is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._status = self._zygote.ask(Bury(self.pid))
        return self._status
