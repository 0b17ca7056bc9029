"""What only a mori process is asked, and what two nodes' mori transports tell each other: the cards."""

from typing import Final

import msgspec

from pdserve.kvd import types
from pdserve.kvd.transport import child_wire as wire
from pdserve.rpc.errors import TransferFailed

DRAIN_S: Final = 1.0
"""What reads from peers that answer have to come to an end, before the process ends for another one's."""
IGNORED: Final = (
    "MORI_IO_ENABLE_NOTIFICATION",
    "MORI_DISABLE_AUTO_XGMI",
    "MORI_IO_ENABLE_CHUNKING",
    "MORI_IO_NUM_NICS_PER_TRANSFER",
    "MORI_IO_POST_BATCH_SIZE",
    "MORI_IO_QP_PER_TRANSFER",
)
"""Would go before what kvd needs, silently: notifications fail under load; with the second one at "0" an engine without
an RDMA device carries on, for GPUs of one node only. The others post a batch in several parts, and where one fails it
is not told whether others are under way."""
_CARD: Final = "pdserve.mori.1"


class Registered(msgspec.Struct, array_like=True, frozen=True):
    """A part of a region, as mori has it: host memory is one, device memory one for each allocation."""

    size: int
    memory: bytes
    """As mori describes it to other engines."""


class MapDevice(msgspec.Struct, tag=True):
    """Opens and registers device memory. Answered as a Map is, by its parts (`encode_parts`)."""

    region: str
    bus_id: str
    pieces: tuple[types.Piece, ...]


class MapOwn(msgspec.Struct, tag=True):
    """Allocates memory of a device and registers it, to see whether the device takes any. Answered as a Map is."""

    region: str
    bus_id: str
    size: int


class Reach(msgspec.Struct, tag=True):
    """Opens a session from a peer's memory to a region that is mapped; copies name it by `peer`."""

    peer: str
    region: str
    engine: bytes
    """The peer's, as mori describes it."""
    memory: tuple[Registered, ...]
    """The peer's."""


class Leave(msgspec.Struct, tag=True):
    """Forgets a session; one that is not there is no error."""

    peer: str
    region: str


Asked = wire.Map | MapDevice | MapOwn | wire.Unmap | Reach | Leave

decode_asked = msgspec.msgpack.Decoder(Asked).decode
encode_parts = msgspec.msgpack.Encoder().encode
decode_parts = msgspec.msgpack.Decoder(tuple[Registered, ...]).decode


class Card(msgspec.Struct, array_like=True, frozen=True):
    """How another node reads a region: RemoteRegion.card of this transport. Nothing of it lets anyone read the memory:
    that is asked for at the engine's control port."""

    kind: str
    name: str
    """Names the process that serves it; fresh at each start."""
    backend: str
    size: int
    engine: bytes
    memory: tuple[Registered, ...]


def write_card(name: str, backend: str, engine: bytes, memory: tuple[Registered, ...]) -> bytes:
    """A card."""
    return wire.encode(Card(_CARD, name, backend, sum(part.size for part in memory), engine, memory))


def read_card(data: bytes, backend: str, size: int) -> Card:
    """The card of a region of so many bytes.

    Raises:
        TransferFailed: it is another transport's, version's or backend's, or that of a region of another size, which
            mori would refuse.
    """
    try:
        card = msgspec.msgpack.decode(data, type=Card)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"not a card of mori: {error}") from error
    if card.kind != _CARD:
        raise TransferFailed(f"a card of {card.kind!r}, not of {_CARD!r}")
    if card.backend != backend:
        raise TransferFailed(f"the other node's mori uses {card.backend}, this one {backend}")
    if card.size != size:
        raise TransferFailed(f"a card of {card.size} bytes for a region of {size}")
    return card
