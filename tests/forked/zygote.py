"""Starts processes by fork, with everything imported: a start costs milliseconds, not a second of a core.

Run as `python -m tests.forked.zygote SOCKET KIND`; `forks` is the other side. KIND is a module: importing it imports
what its children share, and its `run(args, fds)` is what a child does. The zygote has no thread and no gRPC channel,
so that a fork is whole. A child is a process like any other, with its own memory, environment and descriptors, and a
session of its own. It is reaped when that is asked for, so that until then its number is nobody else's; and it dies
with the zygote, which ends when its socket does.
"""

import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

MESSAGE_BYTES: Final = 1 << 17
MOST_FDS: Final = 16
ROOM: Final = 1024
"""Bytes that a child's command line may have."""
_PR_SET_PDEATHSIG: Final = 1

Run = Callable[[Sequence[str], Sequence[int]], int]
"""A child's work, with its arguments and descriptors; returns its exit status."""


class Fork(msgspec.Struct, tag=True, frozen=True):
    """A new child; with it come its descriptors, the last one for its stdout and stderr."""

    number: int
    """Of the order, and of its answer."""
    args: tuple[str, ...]
    env: dict[str, str]


class Reap(msgspec.Struct, tag=True, frozen=True):
    """A child has ended: what its status was."""

    number: int
    pid: int


class Answer(msgspec.Struct, frozen=True):
    """To either."""

    number: int
    pid: int
    status: int | None = None
    """Of a child that was reaped, as `subprocess` has it; None: it was forked."""


def main(orders: socket.socket, run: Run) -> None:
    """Forks until its socket ends."""
    decode = msgspec.msgpack.Decoder(Fork | Reap).decode
    gc.collect()
    gc.freeze()  # what is shared stays shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, MOST_FDS)
        if not data:
            return
        match decode(data):
            case Fork(number, args, env):
                pid = os.fork()
                if not pid:
                    orders.close()
                    os._exit(_child(run, args, env, fds))
                for fd in fds:
                    os.close(fd)
                answer = Answer(number, pid)
            case Reap(number, pid):
                answer = Answer(number, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        orders.sendall(msgspec.msgpack.encode(answer))


def become(words: Sequence[str]) -> None:
    """Makes these a child's `sys.argv`, and its command line, by which tests find processes: written over the
    zygote's own, which is long enough for that."""
    sys.argv = list(words)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc_pid_stat(5)
    line = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _child(run: Run, args: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> int:
    """Its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some are made to abort
    signal.signal(signal.SIGINT, signal.default_int_handler)
    *given, words = fds
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.close(words)
    os.environ.clear()
    os.environ.update(env)
    status = 1
    try:
        status = run(args, given)
    except SystemExit as left:
        # None is what a bare `sys.exit()` leaves with, and means success; words mean 1.
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001  # nobody else would say it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), importlib.import_module(sys.argv[2]).run)
