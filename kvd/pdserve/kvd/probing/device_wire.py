"""What kvd and the process that has device memory for a measurement say to each other, in the frames of `child_wire`.

kvd ──▶ Make, Look ──▶ process, whose start is answered by its devices
"""

from typing import Final

import msgspec

from pdserve.kvd.types import DeviceMemory


class Make(msgspec.Struct, tag=True):
    """Makes memory on a device, filled with the pattern of a seed, or with zeros. Answered by its DeviceMemory."""

    name: str
    """Fresh."""
    bus_id: str
    nbytes: int
    seed: int | None


class Look(msgspec.Struct, tag=True):
    """Asks for what some 8 bytes of a memory hold. Answered by their numbers."""

    name: str
    offsets: tuple[int, ...]


decode_asked: Final = msgspec.msgpack.Decoder(Make | Look).decode
decode_buses: Final = msgspec.msgpack.Decoder(tuple[str, ...]).decode
decode_memory: Final = msgspec.msgpack.Decoder(DeviceMemory).decode
decode_words: Final = msgspec.msgpack.Decoder(tuple[int, ...]).decode
encode: Final = msgspec.msgpack.Encoder().encode
