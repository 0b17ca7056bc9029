"""What a worker tells kvd in every step: which blocks a chunk adds and which layers are done.

Sent by ZMQ PUSH to kvd's PULL socket, in order, never blocking the step. A lost notice costs
overlap and never the transfer: the offer at the end of prefill implies that every layer is ready.
A notice frame is one msgpack value. `rank` and `step` let kvd find what a frame speaks of when one
before it was dropped: a LayerReady whose StepBegin is unknown is ignored.
"""

from typing import Final

import msgspec

MAX_FRAME_BYTES: Final = 4 << 20
"""A longer frame is refused unread."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What one step adds to one producer's prompt.

    prompt blocks   | 0 .. first_block-1 | first_block .. first_block+len(block_ids)-1 | ...
                      known before         newly known in this step
    """

    handle: str
    attempt: int
    first_block: int
    """The prompt's block that `block_ids[0]` is."""
    block_ids: tuple[int, ...]
    """The producer's own ids; may be empty where a chunk only fills blocks known before."""
    ready_blocks: int
    """Leading prompt blocks that are complete in a layer once this step has computed it: tokens
    computed // block size, rounded up in the prompt's last chunk."""


class StepBegin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A step starts; `step` rises by one a step, per engine and rank."""

    engine_id: str
    rank: int
    step: int
    chunks: tuple[Chunk, ...]


class LayerReady(msgspec.Struct, frozen=True, array_like=True, tag="layer"):
    """Layer `layer` (index into the region's layout) of this step's chunks is in memory."""

    engine_id: str
    rank: int
    step: int
    layer: int


class StepEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Every layer of this step's chunks is in memory."""

    engine_id: str
    rank: int
    step: int


Notice = StepBegin | LayerReady | StepEnd

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(notice: Notice) -> bytes:
    """One frame."""
    return _encoder.encode(notice)


def decode(frame: bytes) -> Notice:
    """The notice of a frame.

    Raises:
        ValueError: not a notice (msgspec's DecodeError and ValidationError are ValueErrors).
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a notice of {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    return _decoder.decode(frame)
