"""The nouns of kvd. Values only: no I/O, no clock.

A *region* is the KV memory of one rank of one engine. Its *layout* says where block `b` of layer
`l` lies:

    region  |<------------------------------- size ------------------------------------>|
    layer 0 |[b0][b1][b2]...      layer 1 |[b0][b1][b2]...
             ^ span.offset + b * span.stride, span.length bytes

Its *division*, where it is known, says where each token's share of each KV head lies inside a block, so that blocks
can be copied between engines that divide them in another way.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

PROTOCOL = 2
"""Version of the connector protocol; engines and daemons with unequal ones do not talk."""

TRANSFER_ID_BYTES = 16
"""Length of a transfer id: random bytes from the proxy, used once."""


class Mode(enum.Enum):
    """How a transfer is driven."""

    READ = "read"
    WRITE = "write"


class MemoryKind(enum.Enum):
    """Where a region lies."""

    HOST = "host"
    CUDA = "cuda"
    ROCM = "rocm"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of one allocation of device memory, by its handle for other processes (CUDA and HIP IPC)."""

    handle: bytes
    """Of the whole allocation."""
    offset: int
    """Bytes from the allocation's start."""
    size: int
    """Bytes."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """The memory of a rank on an accelerator. Its region is the pieces, one behind the other; nothing of it can be
    opened any more once the rank's process has ended."""

    bus_id: str
    """PCI bus id of the device, which is the same in every process: `0000:1b:00.0`."""
    pieces: tuple[Piece, ...]
    events: tuple[bytes, ...] = ()
    """Handles of events that the rank records on its device: two rings, for even and odd steps, each with one event
    a layer and one for the step's end. Empty: the rank tells of a layer only when it is in memory."""

    def slot(self, step: int, layer: int | None) -> int | None:
        """The event of a layer (None: the step's end); None where there is none."""
        ring = len(self.events) // 2
        at = ring - 1 if layer is None else layer
        return (step % 2) * ring + at if 0 <= at < ring else None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One equally spaced run of blocks of one layer, in bytes from the region's start.

    A layer has one span, or one for K and one for V where they lie apart.
    """

    offset: int
    stride: int
    length: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Where one part of the KV (keys, values, or both as one) of each token and head lies in a block. All offsets and
    strides are bytes.

        step s of head h, unit u   at   offset + s * step_stride + h * head_stride + u * unit_stride, unit_bytes
    """

    name: str
    """"k", "v", or "kv": parts of one name hold the same, whoever computed it."""
    span: int
    """Which of its layer's spans."""
    offset: int
    """From the start of the block in that span."""
    step_stride: int
    head_stride: int
    units: int
    """Pieces of one step of one head: 1 where its bytes lie together."""
    unit_stride: int
    unit_bytes: int


class Division(msgspec.Struct, frozen=True):
    """How the bytes of a block divide among tokens and KV heads; the same in each layer."""

    first_head: int
    """The first KV head of the model that this rank holds."""
    heads: int
    """How many it holds."""
    total_heads: int
    """Of the model; 1 where each rank holds the same latent (MLA)."""
    parts: tuple[Part, ...]
    step: int = 1
    """Tokens that lie together: the attention kernel packs so many into one tile, which is never taken apart."""

    def span_bytes(self, span: int, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens that lie in one span."""
        steps = block_size // self.step
        return sum(steps * self.heads * part.units * part.unit_bytes for part in self.parts if part.span == span)


class Layout(msgspec.Struct, frozen=True):
    """Where the blocks of one rank's region are; what may differ between two engines."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    layers: tuple[tuple[Span, ...], ...]
    """Spans of each layer, in the order in which the model computes them."""
    division: Division | None = None
    """None: not known; then blocks are copied as they are, to blocks of equal size."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(span.length for layer in self.layers for span in layer)

    def check(self, size: int) -> None:
        """Raises ValueError where a span leaves a region of `size` bytes, or where the division cannot be one of these
        spans."""
        for index, layer in enumerate(self.layers):
            for span in layer:
                end = span.offset + span.stride * (self.num_blocks - 1) + span.length
                if span.length <= 0 or span.offset < 0 or span.stride < span.length or end > size:
                    raise ValueError(f"layer {index} leaves its region: {span} in {size} bytes")
        if self.division is not None:
            self._check_division(self.division)

    def _check_division(self, division: Division) -> None:
        """A division that reaches beyond its spans would let a copy read or write what is another's."""
        if division.step < 1 or self.block_size % division.step:
            raise ValueError(f"blocks of {self.block_size} tokens in steps of {division.step}")
        if division.heads < 1 or not 0 <= division.first_head <= division.total_heads - division.heads:
            held = f"from {division.first_head} on {division.heads} of {division.total_heads}"
            raise ValueError(f"a rank cannot hold these KV heads: {held}")
        if len({part.name for part in division.parts}) != len(division.parts):
            raise ValueError("two parts of one name")
        steps = self.block_size // division.step
        for index, layer in enumerate(self.layers):
            for at, span in enumerate(layer):
                if division.span_bytes(at, self.block_size) != span.length:
                    raise ValueError(f"layer {index}: the parts of a block do not fill its {span.length} bytes")
            for part in division.parts:
                if not 0 <= part.span < len(layer):
                    raise ValueError(f"layer {index} has no span {part.span}")
                numbers = (part.offset, part.step_stride, part.head_stride, part.unit_stride)
                end = part.offset + part.unit_bytes + (steps - 1) * part.step_stride
                end += (division.heads - 1) * part.head_stride + (part.units - 1) * part.unit_stride
                if min(numbers) < 0 or part.units < 1 or part.unit_bytes < 1 or end > layer[part.span].length:
                    raise ValueError(f"layer {index}: part {part.name} leaves its block")


Identity = Mapping[str, str]
"""What two engines must share for a hand-over to be right, as names and values: model, weights,
dtype, kv_dtype, layers, kv_heads, head_size, attention_layout, connector_protocol, ...; also block_size and
tensor_parallel where a block's division is not known."""


def identity_difference(ours: Identity, theirs: Identity) -> dict[str, str]:
    """What differs, as `{name: "ours != theirs"}`; empty for equal identities."""
    names = sorted({*ours, *theirs})
    return {n: f"{ours.get(n)} != {theirs.get(n)}" for n in names if ours.get(n) != theirs.get(n)}


@dataclass(frozen=True, slots=True)
class RegionKey:
    """Names one rank's memory. `engine_id` is fresh at every start, so this is never reused."""

    engine_id: str
    rank: int

    def __str__(self) -> str:
        """For logs."""
        return f"{self.engine_id}/{self.rank}"


class Locator(msgspec.Struct, frozen=True):
    """How to reach an engine's KV. Travels signed and unread through the proxy."""

    engine_id: str
    kvd_address: str
    """gRPC target at which other nodes reach the engine's kvd; its own socket on one node."""
    identity: dict[str, str]
    layout: str = ""
    """How its KV lies, in words: for whoever reads why two engines do not fit."""


class Ticket(msgspec.Struct, frozen=True):
    """A locator and what was offered: what prefill's answer carries to decode in READ."""

    locator: Locator
    transfer_id: bytes
    tokens: int
    blocks: int
