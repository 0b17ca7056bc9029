"""How a rank hands its memory to kvd: one message each way on a Unix SEQPACKET socket.

    worker -> kvd   msgpack(RegisterRegion) + for host memory the memfd as SCM_RIGHTS (exactly one descriptor);
                    device memory goes by the handles in the message, without a descriptor, or with
                    the socket at which its rank takes orders (transport/rank_host)
    kvd -> worker   msgpack(RegisterReply)

The connection then stays open and silent for the rank's life: its end is the rank's death. A
worker that sees the end knows that kvd is gone, that nothing of kvd writes any more, and may
connect again. Helpers here are blocking; both ends' sockets keep a timeout.
"""

import socket
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from pdserve.kvd.types import DeviceMemory, Layout

MAX_MESSAGE_BYTES: Final = 1 << 17


class RegisterRegion(msgspec.Struct, frozen=True):
    """One rank's memory. The engine must have attached (any participant) or do so soon."""

    engine_id: str
    rank: int
    size: int
    """Bytes of the region; the file has at least as many."""
    kind: Literal["host", "cuda", "rocm"]
    layout: Layout
    device: DeviceMemory | None = None
    """Where `kind` is not host."""


class RegisterReply(msgspec.Struct, frozen=True):
    """Whether kvd has mapped the region; a refusal carries a reason of pdserve.rpc.errors."""

    ok: bool
    reason: str = ""
    error: str = ""


_encoder = msgspec.msgpack.Encoder()
_register = msgspec.msgpack.Decoder(RegisterRegion)
_reply = msgspec.msgpack.Decoder(RegisterReply)


def connect(path: str, timeout: float) -> socket.socket:
    """A connected socket whose calls wait at most `timeout` seconds.

    Raises:
        OSError: nobody listens at `path`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def send_region(sock: socket.socket, message: RegisterRegion, fds: Sequence[int] = ()) -> None:
    """Sends the region and its descriptor; the caller keeps its own descriptor.

    Raises:
        ValueError: a message that kvd would not read.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a region of {len(data)} bytes in words; kvd reads at most {MAX_MESSAGE_BYTES}")
    socket.send_fds(sock, [data], fds)


def receive_reply(sock: socket.socket) -> RegisterReply:
    """kvd's answer.

    Raises:
        ConnectionError: kvd closed the connection first.
        TimeoutError: no answer within the socket's timeout.
        ValueError: not an answer.
    """
    data = sock.recv(MAX_MESSAGE_BYTES)
    if not data:
        raise ConnectionError("kvd closed the memory socket before it answered")
    return _reply.decode(data)


def decode_region(data: bytes) -> RegisterRegion:
    """Raises ValueError where `data` is not a RegisterRegion."""
    return _register.decode(data)


def encode_reply(reply: RegisterReply) -> bytes:
    """One message."""
    return _encoder.encode(reply)
