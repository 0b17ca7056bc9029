"""Who may speak at the daemon's Unix sockets: users, by the kernel's word (SO_PEERCRED). Root and the daemon's own may.

The kernel does not let others in either, by the modes of the folder and of the sockets; this holds where those were
changed, or where a container's users are not the host's. gRPC does not say who calls: its socket has its mode alone.
"""

import os
import socket
import struct
from collections.abc import Collection
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid, gid."""


def allowed(more: Collection[int]) -> frozenset[int]:
    """The users that may: root, this process's, and `more`."""
    return frozenset({0, os.geteuid(), *more})


def user_of(connection: socket.socket) -> int:
    """The user of the process that connected.

    Raises:
        OSError: it is no Unix socket.
    """
    return _credentials(connection)[1]


def process_of(connection: socket.socket) -> int:
    """The id of the process that connected, or that made a pair of sockets; 0 for one that this process does not see.

    Raises:
        OSError: it is no Unix socket.
    """
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid
