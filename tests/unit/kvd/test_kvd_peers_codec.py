"""What daemons say survives the wire; what they cannot mean is refused."""

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, peer_pb2
from pdserve.kvd.client.messages import Accept, Cancel, End, Facts, Outcome, Renew, Retract
from pdserve.kvd.effects import CancelOp, TearDown
from pdserve.kvd.peers import codec
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
from pdserve.kvd.registry import Region
from pdserve.kvd.types import Division, Layout, MemoryKind, Part, RegionKey, Span
from pdserve.rpc.errors import InvalidRequest

TID = bytes(range(16))
FACTS = Facts(1, 2, 3, 4, 5, "sim", 7, 8, 9, 10, 11, 12, "lane")
BEGIN = kvd_pb2.AttachRequest(begin=kvd_pb2.Begin(mode=common_pb2.TRANSFER_MODE_READ))
REGION = Region(4096, MemoryKind.CUDA, Layout(16, 4, ((Span(0, 64, 32), Span(1024, 64, 32)), (Span(2048, 64, 64),))))
DIVIDED = Region(
    4096,
    MemoryKind.HOST,
    Layout(
        16,
        4,
        ((Span(0, 64, 64),),),
        Division(2, 1, 4, (Part("k", 0, 0, 4, 64, 2, 32, 1), Part("v", 0, 2, 4, 64, 1, 0, 2)), 8),
    ),
)


@pytest.mark.parametrize(
    "message",
    [
        ClockOffset(-5, 7, 3),
        PeerEngine("e", 2, {"model": "m"}, {0: REGION, 1: REGION}),
        RegionCards(RegionKey("e", 1), {"nixl": b"\x00\xff", "sim": b""}),
        PeerEngineGone("e", "died", True),
        Relayed("e", Accept("h", TID, 1, (3, 4), 2, ticket=b"t", stamped_ns=9)),
        Relayed("e", Accept("h", TID, 0, (), 0, peer_locator=b"l")),
        Relayed("e", Retract("h", 0, True, "CANCELLED")),
        Relayed("", Cancel(TID, "CANCELLED")),
        Relayed("e", Renew((TID, TID))),
        Told(
            "e",
            End("h", TID, Outcome.LANDED, facts=FACTS, consumer=2),
        ),
        Told("e", End("h", TID, Outcome.FAILED, "PEER_LOST", "gone")),
        PostOp(2**40, TID, "p", "d", "h", 1, (0, 1), (5, 6), (7, 8)),
        PostOp(2**40, TID, "p", "d", "h", 1, (0, 1), (5, 5), (7, 8), source_rank=3, first=2**33),
        PeerEngine("e", 1, {"model": "m"}, {0: DIVIDED}),
        CancelOp(9),
        TearDown((1, 2)),
        OpEnded(3, 10**12, 5, "nixl", "", "tcp/eth0"),
        OpEnded(3, error="it failed"),
    ],
)
def test_every_message_survives_the_wire(message: Message) -> None:
    """With its place in the row."""
    frame = Frame(3, 2, message)
    wire = codec.encode(frame).SerializeToString()
    assert codec.decode(peer_pb2.PeerFrame.FromString(wire)) == frame


def test_a_frame_that_only_acknowledges() -> None:
    """It has no message, and no number."""
    assert codec.decode(codec.encode(Frame(0, 7))) == Frame(0, 7)


def test_a_greeting_survives_the_wire() -> None:
    """With the nonce that its answer must be signed over."""
    greeting = Greeting("epoch", "1.0", 1, "node", "a:1", "boot", 5, 6, 7, True, 8, 1000)
    assert codec.decode_greeting(codec.encode_greeting(greeting, b"nonce")) == (greeting, b"nonce")


@pytest.mark.parametrize(
    "wire",
    [
        peer_pb2.PeerFrame(number=1),
        peer_pb2.PeerFrame(number=1, relayed=peer_pb2.Relayed(engine_id="e")),
        peer_pb2.PeerFrame(number=1, relayed=peer_pb2.Relayed(engine_id="e", request=BEGIN)),
        peer_pb2.PeerFrame(
            number=1, told=peer_pb2.Told(engine_id="e", response=kvd_pb2.AttachResponse(fenced=kvd_pb2.Fenced()))
        ),
        peer_pb2.PeerFrame(number=1, engine=peer_pb2.PeerEngine(regions=[peer_pb2.PeerRegion(kind="paper")])),
    ],
)
def test_what_a_peer_cannot_mean_is_refused(wire: peer_pb2.PeerFrame) -> None:
    """Empty frames, words that are for one's own daemon, memory that there is none of."""
    with pytest.raises(InvalidRequest):
        codec.decode(wire)


def test_garbage_is_no_greeting() -> None:
    """Nor is one without an epoch."""
    for data in (b"\xff\xff\xff", b""):
        with pytest.raises(InvalidRequest):
            codec.decode_greeting(data)
