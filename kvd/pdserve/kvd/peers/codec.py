"""PeerService's messages as values and back. What engines say travels as they said it: see the two Attach codecs."""

from google.protobuf.message import DecodeError

from pdserve.api.kvd.v1 import kvd_pb2, peer_pb2
from pdserve.kvd import codec as attach
from pdserve.kvd.client import codec as client
from pdserve.kvd.client.messages import Accept, Cancel, End, Renew, Retract
from pdserve.kvd.effects import CancelOp, TearDown
from pdserve.kvd.peers import region_codec
from pdserve.kvd.peers.messages import (
    ClockOffset,
    Frame,
    Greeting,
    Message,
    OpEnded,
    PeerEngine,
    PeerEngineGone,
    PostOp,
    RegionCards,
    Relayed,
    Told,
)
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import InvalidRequest


def encode_greeting(greeting: Greeting, nonce: bytes = b"") -> bytes:
    """What is signed, less the other side's nonce."""
    return peer_pb2.Greeting(
        kvd_epoch=greeting.epoch,
        version=greeting.version,
        protocol=greeting.protocol,
        node=greeting.node,
        address=greeting.address,
        boot_id=greeting.boot_id,
        monotonic_ns=greeting.monotonic_ns,
        unix_ns=greeting.unix_ns,
        link=greeting.link,
        held=greeting.held,
        received=greeting.received,
        beat_ms=greeting.beat_ms,
        nonce=nonce,
    ).SerializeToString()


def decode_greeting(data: bytes) -> tuple[Greeting, bytes]:
    """A greeting and its nonce.

    Raises:
        InvalidRequest: not a greeting.
    """
    try:
        said = peer_pb2.Greeting.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"not a greeting: {error}") from error
    if not said.kvd_epoch:
        raise InvalidRequest("a greeting without an epoch")
    greeting = Greeting(
        said.kvd_epoch,
        said.version,
        said.protocol,
        said.node,
        said.address,
        said.boot_id,
        said.monotonic_ns,
        said.unix_ns,
        said.link,
        said.held,
        said.received,
        said.beat_ms,
    )
    return greeting, said.nonce


def encode(frame: Frame) -> peer_pb2.PeerFrame:
    """One frame."""
    wire = peer_pb2.PeerFrame(number=frame.number, received=frame.received)
    match frame.message:
        case None:
            pass
        case ClockOffset() as clock:
            wire.clock.monotonic_ns, wire.clock.unix_ns = clock.monotonic_ns, clock.unix_ns
            wire.clock.uncertainty_ns = clock.uncertainty_ns
        case PeerEngine() as engine:
            wire.engine.engine_id, wire.engine.ranks = engine.engine_id, engine.ranks
            wire.engine.identity.update(engine.identity)
            wire.engine.regions.extend(
                region_codec.encode(rank, region) for rank, region in sorted(engine.regions.items())
            )
        case RegionCards(key, cards):
            wire.cards.engine_id, wire.cards.rank = key.engine_id, key.rank
            wire.cards.cards.update(cards)
        case PeerEngineGone() as gone:
            wire.gone.engine_id, wire.gone.detail, wire.gone.over = gone.engine_id, gone.detail, gone.over
        case Relayed(engine_id, request):
            wire.relayed.engine_id = engine_id
            wire.relayed.request.CopyFrom(client.encode(request))
        case Told(engine_id, end):
            wire.told.engine_id = engine_id
            wire.told.response.CopyFrom(attach.encode(end))
        case PostOp() as post:
            wire.post.CopyFrom(
                peer_pb2.PostOperation(
                    op_id=post.op_id,
                    transfer_id=post.transfer_id,
                    source_engine_id=post.source,
                    engine_id=post.engine_id,
                    handle=post.handle,
                    rank=post.rank,
                    layers=post.layers,
                    source_blocks=post.src_blocks,
                    blocks=post.dst_blocks,
                    source_rank=post.source_rank,
                    first_unit=post.first,
                )
            )
        case CancelOp(op_id):
            wire.cancel.op_id = op_id
        case TearDown(op_ids):
            wire.tear_down.op_ids.extend(op_ids)
        case OpEnded() as ended:
            wire.ended.op_id, wire.ended.bytes, wire.ended.copy_ns = ended.op_id, ended.moved, ended.ns
            wire.ended.transport, wire.ended.error, wire.ended.lanes = ended.transport, ended.error, ended.lanes
    return wire


def decode(wire: peer_pb2.PeerFrame) -> Frame:
    """One frame.

    Raises:
        InvalidRequest: a message that this version does not know, or that cannot be what it says.
    """
    return Frame(wire.number, wire.received, _message(wire))


def _message(wire: peer_pb2.PeerFrame) -> Message | None:
    match wire.WhichOneof("message"):
        case None if not wire.number:
            return None
        case "clock":
            return ClockOffset(wire.clock.monotonic_ns, wire.clock.unix_ns, wire.clock.uncertainty_ns)
        case "engine":
            regions = {region.rank: region_codec.decode(region) for region in wire.engine.regions}
            return PeerEngine(wire.engine.engine_id, wire.engine.ranks, dict(wire.engine.identity), regions)
        case "cards":
            return RegionCards(RegionKey(wire.cards.engine_id, wire.cards.rank), dict(wire.cards.cards))
        case "gone":
            return PeerEngineGone(wire.gone.engine_id, wire.gone.detail, wire.gone.over)
        case "relayed":
            return Relayed(wire.relayed.engine_id, _decode_request(wire.relayed.request))
        case "told":
            return Told(wire.told.engine_id, _decode_end(wire.told.response))
        case "post":
            post = wire.post
            return PostOp(
                post.op_id,
                post.transfer_id,
                post.source_engine_id,
                post.engine_id,
                post.handle,
                post.rank,
                tuple(post.layers),
                tuple(post.source_blocks),
                tuple(post.blocks),
                post.source_rank,
                post.first_unit,
            )
        case "cancel":
            return CancelOp(wire.cancel.op_id)
        case "tear_down":
            return TearDown(tuple(wire.tear_down.op_ids))
        case "ended":
            ended = wire.ended
            return OpEnded(ended.op_id, ended.bytes, ended.copy_ns, ended.transport, ended.error, ended.lanes)
        case other:
            raise InvalidRequest(f"a frame that is {other or 'empty'}")


def _decode_request(wire: kvd_pb2.AttachRequest) -> Accept | Retract | Cancel | Renew:
    request = attach.decode(wire)
    if isinstance(request, Accept | Retract | Cancel | Renew):
        return request
    raise InvalidRequest(f"a {type(request).__name__} is for its own node's daemon")


def _decode_end(wire: kvd_pb2.AttachResponse) -> End:
    end = client.decode(wire)
    if isinstance(end, End):
        return end
    raise InvalidRequest(f"a {type(end).__name__} is no peer's to send")
