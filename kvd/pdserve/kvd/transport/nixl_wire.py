"""What only a nixl process is asked, and what two nodes' nixl transports tell each other: the cards."""

import msgspec

from pdserve.kvd.transport import child_wire as wire
from pdserve.rpc.errors import TransferFailed

_CARD = "pdserve.nixl.1"


class Load(msgspec.Struct, tag=True):
    """Makes another agent's memory known."""

    metadata: bytes


Asked = wire.Map | wire.Unmap | Load

decode_asked = msgspec.msgpack.Decoder(Asked).decode


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
    return wire.encode(Card(_CARD, agent, address, size, metadata))


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
