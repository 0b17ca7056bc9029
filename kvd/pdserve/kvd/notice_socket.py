"""The ZMQ PULL socket that workers' per-step notices come in by."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import structlog
import zmq

from pdserve.kvd.notices import Notice, decode

log = structlog.get_logger(__name__)

_HIGH_WATER: Final = 10_000
_AT_ONCE: Final = 256
"""Notices read before other work of the loop has its turn."""


class NoticeSocket:
    """Reads on the running event loop, without a thread; `hear` is called for each notice."""

    def __init__(self, path: Path, hear: Callable[[Notice], None], users: Collection[int]) -> None:
        """`users`: those that are heard, by uid; a connection of another is closed unread."""
        self._path = path
        self._hear = hear
        self._users = users
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self.malformed = 0
        """Frames that were no notices."""

    def start(self) -> None:
        """Binds.

        Raises:
            OSError: the path cannot be bound (zmq's error is one).
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for user in self._users:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, user)  # each call adds one
        try:
            self._socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        self._path.chmod(0o600)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, self._readable)
        loop.call_soon(self._readable)

    def close(self) -> None:
        """Stops; safe twice."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = -1
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
            self._path.unlink(missing_ok=True)

    def _readable(self) -> None:
        # ZMQ's descriptor tells of a change once: read until nothing is left, or come back.
        for _ in range(_AT_ONCE):
            if self._socket is None:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                notice = decode(frame)
            except ValueError as error:
                self.malformed += 1
                log.warning("notice_malformed", error=str(error))
                continue
            self._hear(notice)
        asyncio.get_running_loop().call_soon(self._readable)
