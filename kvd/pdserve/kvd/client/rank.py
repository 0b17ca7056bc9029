"""What a rank gives to kvd at each new welcome: its memory, and the socket of its notices."""

import asyncio
import socket
import threading
from dataclasses import dataclass
from typing import Protocol

from pdserve.kvd import memory_wire
from pdserve.kvd.client.messages import Welcome
from pdserve.kvd.client.notices import NoticeSender
from pdserve.kvd.types import DeviceMemory, Layout, MemoryKind
from pdserve.rpc.errors import KvdUnavailable, from_reason

_REPLY_TIMEOUT_S = 10.0
"""kvd maps the region before it answers."""
_DEVICE_TIMEOUT_S = 60.0
"""The first region of a device makes kvd start that device and compile its kernel."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's KV memory. The descriptor stays the owner's."""

    fd: int
    """-1 for device memory."""
    size: int
    """Bytes."""
    layout: Layout
    kind: MemoryKind = MemoryKind.HOST
    device: DeviceMemory | None = None
    """Where `kind` is not host; what its handles stand for stays the owner's too."""


class Hosts(Protocol):
    """What does a library's work in the rank's own process, where kvd wants that (client.mori_host)."""

    def offer(self) -> socket.socket:
        """The socket at which it takes orders, for kvd; what was ordered at an earlier one is over. Blocks.

        Raises:
            KvdUnavailable: it is not.
        """
        ...

    def close(self) -> None:
        """Ends what was ordered. Blocks. Safe twice."""
        ...


class RegionClient:
    """Registers one rank's memory and keeps the connection, whose end is the rank's death."""

    def __init__(
        self, engine_id: str, rank: int, memory: Memory, timeout: float | None = None, hosts: Hosts | None = None
    ) -> None:
        """`timeout`: longest wait for kvd's answer, seconds; None: what is enough for this kind of memory. `hosts`: for
        device memory that only this process can register."""
        if hosts is not None and memory.kind is MemoryKind.HOST:
            raise ValueError("host memory is registered by kvd")
        self._hosts = hosts
        self._message = memory_wire.RegisterRegion(
            engine_id=engine_id,
            rank=rank,
            size=memory.size,
            kind=memory.kind.value,
            layout=memory.layout,
            device=memory.device,
        )
        self._fds = (memory.fd,) if memory.kind is MemoryKind.HOST else ()
        enough = _REPLY_TIMEOUT_S if memory.kind is MemoryKind.HOST else _DEVICE_TIMEOUT_S
        self._timeout = enough if timeout is None else timeout
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def register(self, path: str) -> None:
        """Sends the memory to the socket at `path`; an earlier connection is closed. Blocks.

        Raises:
            KvdUnavailable: nobody answers there.
            PdserveError: kvd refused the region; the class of its reason.
        """
        with self._lock:
            self._drop()
            if self._closed:
                raise KvdUnavailable("the rank has ended")
            sock: socket.socket | None = None
            try:
                sock = memory_wire.connect(path, self._timeout)
                self._send(sock)
                reply = memory_wire.receive_reply(sock)
            except (OSError, ValueError) as error:
                if sock is not None:
                    sock.close()
                raise KvdUnavailable(f"kvd did not take the memory at {path}: {error}") from error
            if not reply.ok:
                sock.close()
                raise from_reason(reply.reason, reply.error)
            self._socket = sock

    def close(self) -> None:
        """Tells kvd that the rank has ended; what it hosts has, then. Blocks for that. Safe twice."""
        if self._hosts is not None:
            self._hosts.close()
        with self._lock:
            self._closed = True
            self._drop()

    def _send(self, sock: socket.socket) -> None:
        if self._hosts is None:
            memory_wire.send_region(sock, self._message, self._fds)
            return
        with self._hosts.offer() as orders:
            memory_wire.send_region(sock, self._message, (*self._fds, orders.fileno()))

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Rank:
    """One rank's memory and notices; give `welcomed` to its attachment as `on_welcome`."""

    def __init__(self, engine_id: str, rank: int, memory: Memory, hosts: Hosts | None = None) -> None:
        """`memory` must outlive this. `hosts`: see RegionClient."""
        self.region = RegionClient(engine_id, rank, memory, hosts=hosts)
        self.notices = NoticeSender()

    async def welcomed(self, welcome: Welcome, fresh: bool) -> None:
        """Registers with a kvd that does not know the memory yet.

        Raises:
            PdserveError: as RegionClient.register.
        """
        if fresh:
            await asyncio.to_thread(self.region.register, welcome.memory_socket)
        self.notices.connect(welcome.notice_endpoint)

    def close(self) -> None:
        """Ends the rank: kvd fences what was open and unmaps. Safe twice."""
        self.notices.close()
        self.region.close()
