"""Real processes that start in milliseconds: the zygote seen from the tests, and its children."""

import asyncio
import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.forked.zygote import MESSAGE_BYTES, ROOM, Answer, Fork, Reap

ROOT = Path(__file__).resolve().parents[2]
_ANSWER_S = 20.0
"""The zygote's imports are within it."""


class Zygote:
    """See zygote.py. It starts with its first order. Orders block for milliseconds, so that whoever gives one cannot
    go away in the middle."""

    def __init__(self, kind: str) -> None:
        """`kind`: the module that its children are."""
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._orders, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.patience(_ANSWER_S)
        self._numbers = itertools.count(1)
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    @property
    def pid(self) -> int | None:
        """Its own; None before its first order."""
        return None if self._process is None else self._process.pid

    def patience(self, seconds: float) -> None:
        """How long an order may take from now on."""
        self._orders.settimeout(seconds)

    def fork(self, args: Sequence[str], env: Mapping[str, str], words: int, fds: Sequence[int] = ()) -> "Forked":
        """A new process. `words`: the file that it writes to as its stdout and stderr; `fds`: what else it is given.

        Raises:
            OSError: the zygote has died, or does not answer.
        """
        number = next(self._numbers)
        return Forked(self, self._ask(Fork(number, tuple(args), dict(env)), [*fds, words]).pid)

    def reap(self, pid: int) -> int:
        """Waits for a child that has ended; its status. Raises OSError as `fork` does."""
        status = self._ask(Reap(next(self._numbers), pid)).status
        assert status is not None, "the zygote has forked instead"
        return status

    def close(self) -> None:
        """Ends it, and with it whatever it has started. Safe twice."""
        self._orders.close()
        self._theirs.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: Fork | Reap, fds: Sequence[int] = ()) -> Answer:
        if self._process is None:
            self._process = self._start()
        socket.send_fds(self._orders, [msgspec.msgpack.encode(order)], fds)
        while True:
            data = self._orders.recv(MESSAGE_BYTES)
            if not data:
                raise OSError(f"the zygote has ended ({self._process.poll()})")
            answer = self._decode(data)
            if answer.number == order.number:
                return answer
            # To an order that was given up because it took too long: nobody has its child.
            if answer.status is None:
                os.kill(answer.pid, signal.SIGKILL)  # it is not reaped, so the number is still its own

    def _start(self) -> subprocess.Popen[bytes]:
        number = self._theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked.zygote", str(number), self._kind, "." * ROOM],
            pass_fds=[number],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            # Threads would not be in a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._theirs.close()
        return process


class Forked:
    """A child of the zygote, held by its pidfd until it is reaped: then its number may be another's."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._fd = os.pidfd_open(pid)
        self._status: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a stopped one lives."""
        return self._status is None and not select.select([self._fd], [], [], 0)[0]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing where it has ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    async def wait(self, seconds: float | None = None) -> int:
        """Waits for its end, without `seconds` for ever; its status. Not for two at once.

        Raises:
            TimeoutError: it lives on.
            OSError: the zygote has died.
        """
        if self._status is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._fd, ended.set)
            try:
                async with asyncio.timeout(seconds):
                    await ended.wait()
            finally:
                loop.remove_reader(self._fd)
            self._status = self._zygote.reap(self.pid)
            self.close()
        return self._status

    def close(self) -> None:
        """Lets go of it, whether it has ended or not. Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
