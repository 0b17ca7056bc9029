"""The registration wire takes ours, lists strangers, and refuses what is not signed."""

from typing import Any

import msgspec
import pytest

from pdserve.rpc.errors import IncompatibleEngines, InvalidRequest, Unauthenticated
from pdserve.runtime import beats
from pdserve.runtime.beats import Beat, Foreign, Reply
from pdserve.runtime.signing import Kind, Signer

NOW = 1_000_000.0
SIGNER = Signer(b"a key of the cluster")

STOCK: dict[str, Any] = {
    "type": "P",
    "http_address": "10.0.0.1:8000",
    "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
    "dp_size": 1,
    "tp_size": 2,
    "transfer_mode": "READ",
}


def beat(**changes: Any) -> Beat:
    """A beat as a service makes it."""
    values: dict[str, Any] = STOCK | {
        "engine_id": "e1",
        "grpc_address": "10.0.0.1:7000",
        "locator": b"\x01signed",
        "model": "m",
        "tokenizer": "bytes",
        "role": "prefill",
        "identity": {"model": "m", "dtype": "float32"},
        "max_model_len": 512,
        "block_size": 16,
        "total_kv_tokens": 1024,
        "free_kv_tokens": 512,
        "running": 1,
        "waiting": 0,
        "steps": 7,
        "state": "ready",
        "beat": 3,
        "sent_at": NOW,
    }
    return Beat(**(values | changes))


def fields(frame: bytes) -> dict[str, Any]:
    """A frame as the map that it is."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(frame)
    return decoded


def test_a_beat_comes_back_as_it_was() -> None:
    """Encoding and decoding is the identity, for every field."""
    assert beats.decode(beats.encode(beat(), SIGNER), SIGNER, NOW) == beat()


def test_a_stock_instance_is_foreign() -> None:
    """A MORI-IO instance has no engine_id; it is read, and needs no tag."""
    decoded = beats.decode(msgspec.msgpack.encode(STOCK), SIGNER, NOW)
    assert decoded == Foreign(**STOCK)


def test_an_old_stock_instance_says_hello() -> None:
    """Older instances send type HELLO, and keys that we do not know."""
    decoded = beats.decode(msgspec.msgpack.encode(STOCK | {"type": "HELLO", "rank": 0}), SIGNER, NOW)
    assert isinstance(decoded, Foreign)
    assert decoded.type == "HELLO"


def test_our_beat_carries_the_stock_keys() -> None:
    """A stock proxy would find all it looks for."""
    assert STOCK.keys() <= fields(beats.encode(beat(), SIGNER)).keys()


def test_keys_of_a_newer_version_are_signed_and_ignored() -> None:
    """A newer service may say more; what it says more is covered by its tag."""
    newer = fields(beats.encode(beat(), SIGNER))
    del newer["auth"]
    newer["colour"] = "green"
    newer["auth"] = SIGNER.sign(Kind.BEAT, beats._digest(newer), NOW + 30)
    assert beats.decode(msgspec.msgpack.encode(newer), SIGNER, NOW) == beat()
    newer["colour"] = "red"
    with pytest.raises(Unauthenticated):
        beats.decode(msgspec.msgpack.encode(newer), SIGNER, NOW)


@pytest.mark.parametrize("name", ["engine_id", "grpc_address", "free_kv_tokens", "identity", "locator", "beat"])
def test_a_changed_field_is_refused(name: str) -> None:
    """Nothing of a beat can be changed on its way."""
    changed = fields(beats.encode(beat(), SIGNER))
    changed[name] = {"str": "x", "int": 99, "dict": {}, "bytes": b"x"}[type(changed[name]).__name__]
    with pytest.raises(Unauthenticated, match="changed"):
        beats.decode(msgspec.msgpack.encode(changed), SIGNER, NOW)


def test_another_key_is_refused() -> None:
    """A beat of another cluster is no registration."""
    with pytest.raises(Unauthenticated, match="not signed"):
        beats.decode(beats.encode(beat(), Signer(b"another key")), SIGNER, NOW)


@pytest.mark.parametrize("auth", [None, "text", b"", b"short"])
def test_a_missing_or_broken_tag_is_refused(auth: object) -> None:
    """ours without a tag is not taken, and not taken for a stranger either."""
    unsigned = fields(beats.encode(beat(), SIGNER)) | {"auth": auth}
    with pytest.raises(Unauthenticated):
        beats.decode(msgspec.msgpack.encode(unsigned), SIGNER, NOW)


def test_an_old_beat_cannot_be_replayed() -> None:
    """A tag is good for 30 s."""
    frame = beats.encode(beat(), SIGNER)
    beats.decode(frame, SIGNER, NOW + beats.LIFETIME - 1)
    with pytest.raises(Unauthenticated, match="too old"):
        beats.decode(frame, SIGNER, NOW + beats.LIFETIME + 1)


def test_a_tag_of_another_kind_is_refused() -> None:
    """A signed locator does not register an engine."""
    other = fields(beats.encode(beat(), SIGNER))
    del other["auth"]
    other["auth"] = SIGNER.sign(Kind.LOCATOR, beats._digest(other), NOW + 30)
    with pytest.raises(Unauthenticated):
        beats.decode(msgspec.msgpack.encode(other), SIGNER, NOW)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"hello", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"type": "P"}), b"\xdf" * 70_000],
    ids=["empty", "reserved", "text", "list", "no address", "long"],
)
def test_noise_is_refused_by_name(frame: bytes) -> None:
    """What is no registration is an InvalidRequest, whatever it is."""
    with pytest.raises(InvalidRequest):
        beats.decode(frame, SIGNER, NOW)


@pytest.mark.parametrize(
    ("name", "value"),
    [("role", "chef"), ("state", "gone"), ("block_size", 0), ("running", -1), ("engine_id", ""), ("model", 4)],
)
def test_a_signed_beat_with_a_bad_field_is_refused(name: str, value: object) -> None:
    """A member of the cluster may still be wrong."""
    bad = fields(beats.encode(beat(), SIGNER)) | {name: value}
    del bad["auth"]
    bad["auth"] = SIGNER.sign(Kind.BEAT, beats._digest(bad), NOW + 30)
    with pytest.raises(InvalidRequest, match=name):
        beats.decode(msgspec.msgpack.encode(bad), SIGNER, NOW)


def test_a_reply_comes_back_as_it_was() -> None:
    """Also one that carries an error."""
    refused = beats.refusal(IncompatibleEngines("dtype differs"), beat=4)
    assert refused == Reply(ok=False, reason="INCOMPATIBLE_ENGINES", detail="dtype differs", beat=4)
    assert beats.decode_reply(beats.encode_reply(refused)) == refused
    with pytest.raises(InvalidRequest):
        beats.decode_reply(b"\x90")
