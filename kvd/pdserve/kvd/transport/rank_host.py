"""A rank whose own process does a library's work on kvd's orders, as kvd sees it.

Some libraries can only register what their own process has allocated. A rank that would have one in its process gives
kvd, with its memory, a socket at which it takes orders. Each order is to begin what a child of kvd's would do
otherwise, over the same two sockets (`child_wire`), so a `RankHost` is a way to start one: `start.Start`.

The socket comes over the memory socket, and whoever made it is asked for once more (SO_PEERCRED): that process is what
is ended where it does not let go of memory that others may still write.
"""

import os
import signal
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from pdserve.kvd.callers import process_of, user_of
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.port import TakesDevices
from pdserve.kvd.transport.start import Command
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed, Unauthenticated


@dataclass(frozen=True, slots=True)
class Engaged:
    """See start.Process. What was begun in a rank's process is over when it says so, or when that process is, either of
    which kvd has waited for: there is nothing left to wait for here."""

    pid: int

    async def wait(self) -> int:
        """See start.Process."""
        return 0


class RankHost:
    """See the module."""

    def __init__(self, orders: socket.socket, pid: int, pidfd: int) -> None:
        """Made by `taken`."""
        self.pid = pid
        self._orders = orders
        self._pidfd = pidfd

    @classmethod
    def taken(cls, fd: int, users: Collection[int]) -> Self:
        """Of a descriptor that came with memory, and stays the caller's.

        Raises:
            InvalidRequest: it is no such socket, or of a process that this one cannot see or end.
            Unauthenticated: of another user than `users`.
        """
        try:
            orders = socket.socket(fileno=os.dup(fd))
        except OSError as error:
            raise InvalidRequest(f"orders are taken at a socket: {error}") from error
        try:
            if (orders.family, orders.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                raise InvalidRequest("orders are taken at a Unix socket of whole messages")
            if (user := user_of(orders)) not in users:
                raise Unauthenticated(f"user {user} may not take this kvd's orders: see --allow-uid")
            orders.setblocking(False)
            pid = process_of(orders)
            return cls(orders, pid, _handle(pid))
        except BaseException:
            orders.close()
            raise

    async def start(self, command: Command) -> Engaged:
        """See start.Start.

        Raises:
            TransferFailed: the rank has ended, or does not read its orders.
        """
        order = wire.Engage(wire.ENGAGE_VERSION, command.args, dict(command.env))
        try:
            signal.pidfd_send_signal(self._pidfd, 0)  # its number may be another one's by now
            socket.send_fds(self._orders, [wire.encode(order)], command.fds)
        except OSError as error:
            raise TransferFailed(f"the rank's process {self.pid} takes no orders: {error}") from error
        return Engaged(self.pid)

    def close(self) -> None:
        """Gives no more orders. Safe twice."""
        self._orders.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@runtime_checkable
class TakesHosts(TakesDevices, Protocol):
    """A transport that may use what a rank offers beside its memory."""

    def offered(self, key: RegionKey, host: RankHost) -> None:
        """Said before `take` of this region, which uses it, or closes it."""
        ...

    def registered_by(self, key: RegionKey) -> str:
        """Who has the library for a region, in words; empty for one that was not taken."""
        ...


def _handle(pid: int) -> int:
    if not pid:
        raise InvalidRequest("orders are given to processes that this kvd sees: it needs the engine's PID namespace")
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        raise InvalidRequest(f"the process {pid} that would take orders is not there: {error}") from error
    try:
        signal.pidfd_send_signal(handle, 0)
    except OSError as error:
        os.close(handle)
        raise InvalidRequest(f"kvd may not end the process {pid} that would take orders: {error}") from error
    return handle
