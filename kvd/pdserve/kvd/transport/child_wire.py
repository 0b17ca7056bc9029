"""What kvd and a process that a transport's library lives in say to each other.

    kvd ──▶ Call(Map | Unmap | the library's own), Copy, Cancel, Retire ──▶ process
        ◀── Answer,              Moving, Ended, Retiring, Broken, LetGo ◀──

Length-prefixed msgpack over a socket pair; a Map's file descriptor comes on a second one, before it. Where the process
is a rank of an engine, both sockets come to it with an Engage, over the socket of its orders (rank_host).
"""

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct("<I")


class Map(msgspec.Struct, tag=True):
    """Maps the file that came, and registers it. Answered with what the library calls the memory."""

    region: str
    size: int


class Unmap(msgspec.Struct, tag=True):
    """Takes a region back; one that is not there is no error."""

    region: str


class Call(msgspec.Struct, tag=True):
    """Asks for something that has an answer."""

    call_id: int
    what: msgspec.Raw
    """A Map, an Unmap, or what only this library is asked."""


class Copy(msgspec.Struct, tag=True):
    """Reads runs of a peer into a region. The three lists are uint64, little-endian."""

    copy_id: int
    region: str
    """Where the bytes go."""
    peer: str
    """What is read, as the library names it."""
    base: int
    """What the source's offsets are counted from."""
    src: bytes
    """Offsets into the source region."""
    dst: bytes
    """Offsets into `region`."""
    length: bytes


class Cancel(msgspec.Struct, tag=True):
    """Asks a copy to end early."""

    copy_id: int


class Retire(msgspec.Struct, tag=True):
    """Asks the process to end, once what is on its way from peers that answer is in place."""

    reason: str


class Answer(msgspec.Struct, tag=True):
    """Of a Call; `error` empty where it was done. Call 0 is the process's start."""

    call_id: int
    data: bytes = b""
    address: int = 0
    """Of the region, where one was mapped."""
    error: str = ""


class Moving(msgspec.Struct, tag=True):
    """Something came, or the process still looks for it. Sent a few times a second at most."""

    copy_id: int


class Ended(msgspec.Struct, tag=True):
    """A copy is terminal: all of its bytes are in place, or it was cancelled and nothing of it writes any more."""

    copy_id: int
    nbytes: int
    ns: int
    cancelled: bool


class Retiring(msgspec.Struct, tag=True):
    """The process ends soon and is to be given nothing more. What it has, also what crossed this word, may still come
    to its end; what does not, fails when the process is gone."""

    reason: str


class Broken(msgspec.Struct, tag=True):
    """The process ends now, and with it every copy that has not."""

    error: str


class LetGo(msgspec.Struct, tag=True):
    """A rank's last word: the library has let go of its memory, and nothing is written any more. Where the sockets are
    closed without it, the rank ends; and only its end says the same."""


class Engage(msgspec.Struct, array_like=True, frozen=True):
    """To a rank whose own process is to do what such a process does; with its two sockets."""

    version: int
    args: tuple[str, ...]
    """As a process of its own is given them."""
    settings: dict[str, str]
    """What its environment must have."""


ENGAGE_VERSION = 1
"""Of what is said from then on."""

ToWorker = Call | Copy | Cancel | Retire
FromWorker = Answer | Moving | Ended | Retiring | Broken | LetGo

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_engage = msgspec.msgpack.Decoder(Engage).decode


def framed(message: ToWorker | FromWorker) -> bytes:
    """A message as it is written."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages' bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole now."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            end = at + _LENGTH.size + length
            if end > len(self._buffer):
                break
            yield bytes(self._buffer[at + _LENGTH.size : end])
            at = end
        del self._buffer[:at]
