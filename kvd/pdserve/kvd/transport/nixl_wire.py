"""What kvd and a nixl process say to each other, and what two nodes' nixl transports do: the cards.

    kvd ──▶ Call(Map | Unmap | Load), Copy, Cancel ──▶ nixl process
        ◀── Answer,                   Moving, Ended ◀──

Length-prefixed msgpack over a socket pair; a Map's file descriptor comes on a second one, before it.
"""

import struct
from collections.abc import Iterator

import msgspec

from pdserve.rpc.errors import TransferFailed

_LENGTH = struct.Struct("<I")
_CARD = "pdserve.nixl.1"


class Map(msgspec.Struct, tag=True):
    """Maps the file that came, and registers it. Answered with the metadata of the memory."""

    region: str
    size: int


class Unmap(msgspec.Struct, tag=True):
    """Takes a region back; one that is not there is no error."""

    region: str


class Load(msgspec.Struct, tag=True):
    """Makes another agent's memory known."""

    metadata: bytes


class Call(msgspec.Struct, tag=True):
    """Asks for something that has an answer."""

    call_id: int
    what: Map | Unmap | Load


class Copy(msgspec.Struct, tag=True):
    """Reads runs of a peer into a region. The three lists are uint64, little-endian."""

    copy_id: int
    region: str
    """Where the bytes go."""
    peer: str
    base: int
    """Address of the source region in the peer's process."""
    src: bytes
    """Offsets into the source region."""
    dst: bytes
    """Offsets into `region`."""
    length: bytes


class Cancel(msgspec.Struct, tag=True):
    """Asks a copy to end early."""

    copy_id: int


class Answer(msgspec.Struct, tag=True):
    """Of a Call; `error` empty where it was done. Call 0 is the process's start."""

    call_id: int
    data: bytes = b""
    address: int = 0
    """Of the region, where one was mapped."""
    error: str = ""


class Moving(msgspec.Struct, tag=True):
    """Some of a copy's bytes came. Sent a few times a second at most."""

    copy_id: int


class Ended(msgspec.Struct, tag=True):
    """A copy is terminal: all of its bytes are in place, or it was cancelled and nothing of it writes any more."""

    copy_id: int
    nbytes: int
    ns: int
    cancelled: bool


class Broken(msgspec.Struct, tag=True):
    """The link to the peer failed; the process ends, and with it every copy."""

    error: str


ToWorker = Call | Copy | Cancel
FromWorker = Answer | Moving | Ended | Broken

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def framed(message: ToWorker | FromWorker) -> bytes:
    """A message as it is written."""
    body = _encoder.encode(message)
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


class Card(msgspec.Struct, array_like=True):
    """How another node reads a region: RemoteRegion.card of this transport."""

    kind: str
    agent: str
    """Names the process that serves it; fresh at each start."""
    address: int
    size: int
    metadata: bytes


def write_card(agent: str, address: int, size: int, metadata: bytes) -> bytes:
    """A card."""
    return _encoder.encode(Card(_CARD, agent, address, size, metadata))


def read_card(data: bytes, size: int) -> Card:
    """The card of a region of so many bytes.

    Raises:
        TransferFailed: it is another transport's, another version's, or that of a smaller region.
    """
    try:
        card = msgspec.msgpack.decode(data, type=Card)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"not a card of nixl: {error}") from error
    if card.kind != _CARD:
        raise TransferFailed(f"a card of {card.kind!r}, not of {_CARD!r}")
    if card.size < size:
        raise TransferFailed(f"a card of {card.size} bytes for a region of {size}")
    return card
