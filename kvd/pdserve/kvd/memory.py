"""The Unix socket that takes the memory of engines' ranks; `memory_wire` has its form.

A connection that has given a region is that rank's life: its end is the rank's death.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import structlog

from pdserve.kvd.callers import user_of
from pdserve.kvd.memory_wire import MAX_MESSAGE_BYTES, RegisterRegion, RegisterReply, decode_region, encode_reply
from pdserve.rpc.errors import InvalidRequest, PdserveError, Unauthenticated
from pdserve.runtime.failpoints import Point, failpoint_now

log = structlog.get_logger(__name__)

_BACKLOG: Final = 128
_MAX_CONNECTIONS: Final = 4096

Register = Callable[[RegisterRegion, Sequence[int]], Awaitable[None]]
"""Maps a region; the descriptors stay the caller's. Raises PdserveError to refuse."""
Gone = Callable[[str, int], None]
"""The connection of this engine's rank has ended."""


class MemorySocket:
    """Listens at a path, on the running event loop. `register` and `gone` are called on it."""

    def __init__(
        self,
        path: Path,
        register: Register,
        gone: Gone,
        hello_timeout: float,
        defect: Callable[[BaseException], None],
        users: Collection[int],
    ) -> None:
        """`hello_timeout`: seconds that a connection has for its region; `defect` is told of errors that only a
        defect of kvd explains; `users`: those that may connect, by uid."""
        self._path = path
        self._register = register
        self._gone = gone
        self._hello_timeout = hello_timeout
        self._defect = defect
        self._users = users
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, tuple[str, int] | None] = {}
        """Connection -> the rank that it is, once it has registered."""
        self._taking: dict[socket.socket, asyncio.Task[None]] = {}
        """Whose region is being mapped."""

    def start(self) -> None:
        """Begins to listen.

        Raises:
            OSError: the path cannot be bound.
        """
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # of a daemon that died; the state folder's lock keeps out a living one
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def drop(self, engine_id: str) -> None:
        """Closes the connections of an engine that has ended in another way."""
        for connection in [c for c, rank in self._connections.items() if rank is not None and rank[0] == engine_id]:
            self._close(connection)

    async def stop(self) -> None:
        """Takes no more regions, and gives up those that are being mapped; what is connected stays so. Safe twice."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for connection in [c for c, rank in self._connections.items() if rank is None and c not in self._taking]:
            self._close(connection)
        taking = list(self._taking.values())
        for task in taking:
            task.cancel()
        if taking:
            await asyncio.wait(taking)

    def close(self) -> None:
        """Closes what is connected, after `stop`; safe twice."""
        for connection in list(self._connections):
            self._close(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            log.error("memory_connections_exhausted", most=_MAX_CONNECTIONS)
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection] = None
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._readable, connection)
        loop.call_later(self._hello_timeout, self._silent, connection)

    def _silent(self, connection: socket.socket) -> None:
        silent = connection in self._connections and connection not in self._taking
        if silent and self._connections[connection] is None:
            log.warning("memory_connection_silent", seconds=self._hello_timeout)
            self._close(connection)

    def _readable(self, connection: socket.socket) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(
                connection, MAX_MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except OSError as error:
            log.info("memory_connection_broken", error=str(error))
            self._ended(connection)
            return
        if data and self._connections[connection] is None:
            asyncio.get_running_loop().remove_reader(connection)  # what it says or does meanwhile is read after that
            task = asyncio.create_task(self._take(connection, data, fds, flags))
            self._taking[connection] = task
            task.add_done_callback(lambda done: self._taken(connection, done))
            return
        for fd in fds:
            os.close(fd)
        if data:
            log.error("memory_connection_talks", rank=self._connections[connection])
        self._ended(connection)

    async def _take(self, connection: socket.socket, data: bytes, fds: list[int], flags: int) -> None:
        try:
            # Not when it connects: whoever is turned away before its message was read may not read why.
            if (user := user_of(connection)) not in self._users:
                raise Unauthenticated(f"user {user} may not give this kvd memory: see --allow-uid")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise InvalidRequest(f"a region is one message of at most {MAX_MESSAGE_BYTES} bytes")
            try:
                message = decode_region(data)
            except ValueError as error:
                raise InvalidRequest(f"not a region: {error}") from error
            failpoint_now(Point.KVD_MEMORY)
            await self._register(message, fds)
        except PdserveError as error:
            log.warning("region_refused", reason=error.reason, error=error.message)
            self._answer(connection, RegisterReply(False, error.reason, error.message))
            self._close(connection)
            return
        except BaseException:
            self._close(connection)  # a defect, or the daemon stops: no answer
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self._connections[connection] = (message.engine_id, message.rank)
        self._answer(connection, RegisterReply(True))
        asyncio.get_running_loop().add_reader(connection, self._readable, connection)

    def _taken(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        del self._taking[connection]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect(error)

    def _answer(self, connection: socket.socket, reply: RegisterReply) -> None:
        try:
            connection.send(encode_reply(reply))
        except OSError as error:  # it is gone; its end is read next
            log.info("memory_answer_lost", error=str(error))

    def _ended(self, connection: socket.socket) -> None:
        rank = self._connections.get(connection)
        self._close(connection)
        if rank is not None:
            self._gone(*rank)

    def _close(self, connection: socket.socket) -> None:
        if connection in self._connections:
            del self._connections[connection]
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()


def check_file(fd: int, message: RegisterRegion) -> None:
    """Whether a file can be the memory that a message says it is; seals it against shrinking.

    A file that shrinks under the mapping would kill the daemon (SIGBUS), so the memory that our own engines make, a
    memfd, is taken only where it cannot. A file in shared memory is of somebody else's making, has no seals, and is
    trusted with that.

    Raises:
        InvalidRequest: not memory of this size, or a memfd that can still shrink.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise InvalidRequest("a region's descriptor is a memfd or a file in shared memory")
    if not _sealed(fd):
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
            raise InvalidRequest("a memfd that cannot be sealed against shrinking: make it with MFD_ALLOW_SEALING")
        log.info("region_not_sealed", engine_id=message.engine_id, rank=message.rank)
    status = os.fstat(fd)  # after the seal: a memfd does not shrink between this look and the mapping
    room = -(-message.size // status.st_blksize) * status.st_blksize  # of huge pages, where it has them
    if message.size <= 0 or not message.size <= status.st_size <= room:
        raise InvalidRequest(f"a region of {message.size} bytes in a file of {status.st_size}")


def _sealed(fd: int) -> bool:
    """Seals a file against shrinking; whether it is."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not a file that has seals
        return False
