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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid
