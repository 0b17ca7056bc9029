"""Starts mori's processes by fork, with all but the library imported: milliseconds instead of a second of a core.

Run as `python -m tests.contract.kvd.zygote SOCKET`; `forks` is the other side. It has no thread, so that a fork is
whole. A child is a process like any other: it runs its module as `python -m` would, with its own memory, environment
and descriptors, may be stopped or killed, and may abort. It is buried when that is asked for, so that until then its
number is nobody else's; and it dies with the zygote, which ends when its socket does.
"""

import ctypes
import gc
import importlib
import os
import resource
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final

import msgspec

LOADS: Final = (
    "numpy",
    "pdserve.kvd.testing.mori_devices",
    "pdserve.kvd.testing.mori_nic",
    "pdserve.kvd.transport.mori_worker",
    "tests.contract.kvd.mori_raw",
)
"""Not the fake itself: it asks its environment what it does when it is loaded."""
MESSAGE_BYTES: Final = 1 << 17
MOST_FDS: Final = 16
ROOM: Final = 1024
"""Bytes that a child's command line may have."""
_PR_SET_PDEATHSIG: Final = 1


class Fork(msgspec.Struct, tag=True, frozen=True):
    """A new child; with it come its descriptors, the last one for its stdout and stderr. Answered by its id."""

    module: str
    args: tuple[str, ...]
    env: dict[str, str]


class Bury(msgspec.Struct, tag=True, frozen=True):
    """A child has ended: what its status was, as `subprocess` has it."""

    pid: int


decode: Final = msgspec.msgpack.Decoder(Fork | Bury).decode


def main(orders: socket.socket) -> None:
    """Forks until its socket ends."""
    for name in LOADS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared stays shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, MOST_FDS)
        if not data:
            return
        match decode(data):
            case Fork() as fork:
                answer = os.fork()
                if not answer:
                    orders.close()
                    os._exit(_run(fork, fds))
                for fd in fds:
                    os.close(fd)
            case Bury(pid):
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        orders.sendall(msgspec.msgpack.encode(answer))


def _run(fork: Fork, fds: list[int]) -> int:
    """The child; its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some are made to abort
    signal.signal(signal.SIGINT, signal.default_int_handler)
    *given, words = fds
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.close(words)
    os.environ.clear()
    os.environ.update(fork.env)
    sys.argv = [fork.module, *fork.args, str(os.getppid()), *map(str, given)]
    _be_called(sys.argv)
    sys.modules.pop(fork.module, None)
    status = 0
    try:
        runpy.run_module(fork.module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001  # nobody else would say it
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _be_called(words: list[str]) -> None:
    """Writes a command line over its own, which was long enough for that: by it tests find processes."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc_pid_stat(5)
    line = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
