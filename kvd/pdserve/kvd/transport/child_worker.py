"""What every process that a transport's library lives in has: its two sockets, and its end with kvd's."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.kvd.transport import child_wire as wire
from pdserve.rpc.errors import TransferFailed

SPINS: Final = 20
"""Looks without news before such a process sleeps between them."""
NAP_S: Final = 50e-6
SAY_EVERY_S: Final = 0.2
"""So often kvd hears of what is under way."""
_RECEIVE_BYTES: Final = 1 << 20
_SELECTABLE: Final = 1024
"""Descriptors that `select` takes: a process that is an engine's may have more."""
_PR_SET_PDEATHSIG: Final = 1


class Channel:
    """The sockets to kvd. Blocks; one thread."""

    def __init__(self, control: socket.socket, files: socket.socket) -> None:
        self._control = control
        self._files = files
        self._frames = wire.Frames()
        self.open = True
        """Whether kvd is still there."""
        self.said = 0.0
        """When something was said last, on the monotonic clock."""

    def hear(self, wait: float | None) -> Sequence[wire.ToWorker]:
        """What has come, after at most `wait` seconds, or (None) when something has."""
        if not _readable(self._control.fileno(), wait):
            return ()
        data = self._control.recv(_RECEIVE_BYTES)
        self.open = bool(data)
        return [wire.decode_to_worker(body) for body in self._frames.feed(data)]

    def say(self, message: wire.FromWorker) -> None:
        """Tells kvd."""
        self.said = time.monotonic()
        self._control.sendall(wire.framed(message))

    def file(self) -> int:
        """The descriptor that came with a Map, to be closed by who took it."""
        _, fds, _, _ = socket.recv_fds(self._files, 1, 1)
        return fds[0]

    def give_file(self, fd: int) -> None:
        """Hands a descriptor to kvd."""
        socket.send_fds(self._files, [b"f"], [fd])


def _readable(fd: int, wait: float | None) -> bool:
    if fd < _SELECTABLE:
        return bool(select.select([fd], [], [], wait)[0])
    poll = select.poll()  # counts in milliseconds
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if wait is None else wait * 1000))


def live(argv: Sequence[str], body: Callable[[Channel, Sequence[str]], None]) -> int:
    """A process's main: `... PARENT CONTROL-FD FILES-FD`; `body` gets what is before these three, and may raise
    TransferFailed, which kvd is told. Does not return but where its parent is gone already."""
    *args, parent, control_fd, files_fd = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # where it hangs in a library it does not see the end
    if os.getppid() != int(parent):
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; kvd still drains
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the memory that it maps holds what users have written
    channel = Channel(socket.socket(fileno=int(control_fd)), socket.socket(fileno=int(files_fd)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # kvd is gone
        try:
            body(channel, args)
        except TransferFailed as error:
            channel.say(wire.Broken(error.message))
    sys.stderr.flush()
    # Not through destructors: a library's would go through what is in flight, and may end in its own abort.
    os._exit(0)
