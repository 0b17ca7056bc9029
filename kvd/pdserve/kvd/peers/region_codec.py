"""A rank's memory, as one daemon describes it to another: values and the wire."""

from pdserve.api.kvd.v1 import peer_pb2
from pdserve.kvd.registry import Region
from pdserve.kvd.types import Division, Layout, MemoryKind, Part, Span
from pdserve.rpc.errors import InvalidRequest


def encode(rank: int, region: Region) -> peer_pb2.PeerRegion:
    """One rank's memory."""
    layout = region.layout
    return peer_pb2.PeerRegion(
        rank=rank,
        kind=region.kind.value,
        bytes=region.size,
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        layers=[
            peer_pb2.LayerSpans(
                spans=[peer_pb2.BlockSpan(offset=s.offset, stride=s.stride, length=s.length) for s in layer]
            )
            for layer in layout.layers
        ],
        division=None if layout.division is None else _encode_division(layout.division),
    )


def decode(wire: peer_pb2.PeerRegion) -> Region:
    """One rank's memory; what it cannot be is refused where it is registered.

    Raises:
        InvalidRequest: memory of a kind that this version does not know.
    """
    try:
        kind = MemoryKind(wire.kind)
    except ValueError:
        raise InvalidRequest(f"memory of kind {wire.kind!r}") from None
    layers = tuple(tuple(Span(s.offset, s.stride, s.length) for s in layer.spans) for layer in wire.layers)
    division = _decode_division(wire.division) if wire.HasField("division") else None
    return Region(wire.bytes, kind, Layout(wire.block_size, wire.num_blocks, layers, division))


def _encode_division(division: Division) -> peer_pb2.BlockDivision:
    return peer_pb2.BlockDivision(
        first_head=division.first_head,
        heads=division.heads,
        total_heads=division.total_heads,
        step_tokens=division.step,
        parts=[
            peer_pb2.BlockPart(
                name=part.name,
                span=part.span,
                offset=part.offset,
                step_stride=part.step_stride,
                head_stride=part.head_stride,
                units=part.units,
                unit_stride=part.unit_stride,
                unit_bytes=part.unit_bytes,
            )
            for part in division.parts
        ],
    )


def _decode_division(wire: peer_pb2.BlockDivision) -> Division:
    parts = tuple(
        Part(p.name, p.span, p.offset, p.step_stride, p.head_stride, p.units, p.unit_stride, p.unit_bytes)
        for p in wire.parts
    )
    return Division(wire.first_head, wire.heads, wire.total_heads, parts, wire.step_tokens)
