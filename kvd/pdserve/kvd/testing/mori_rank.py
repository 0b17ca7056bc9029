"""A rank with memory on the fake device, as a process: `python -m pdserve.kvd.testing.mori_rank SIZE LIBRARY PARENT TO
MEMORY`.

It offers to host the fake mori, as an engine's worker does, to whoever has the other end of TO: one message, the memory
in msgpack with the socket for orders. It ends with TO, in order, or is killed.
"""

import os
import socket
import sys

import msgspec

from pdserve.kvd.client.mori_host import MoriHost
from pdserve.kvd.testing.mori_devices import FakeDeviceMemory


def main(size: int, library: str, to: socket.socket, file: int) -> None:
    """Until the other end is closed. `file`: the allocation, which others may see too."""
    memory = FakeDeviceMemory([size], None, [file])
    host = MoriHost(memory.memory, 0, memory.addresses(), library=library)
    with host.offer() as orders:
        socket.send_fds(to, [msgspec.msgpack.encode(memory.memory)], [orders.fileno()])
    to.recv(1)
    host.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[4])), int(sys.argv[5]))
    os._exit(0)
