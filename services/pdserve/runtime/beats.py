"""The registration wire between services and proxy: one msgpack map a beat, and its answer.

The map has the keys of a stock vLLM MORI-IO instance, so that one socket takes both, and ours
beside them. ZMQ DEALER (service) to ROUTER (proxy), one frame each way:

    service -> proxy   Beat, signed: `auth` = Signer.sign(Kind.BEAT, SHA-256 of the map without `auth`)
    proxy -> service   Reply to each Beat; a stock instance expects none and gets none

Pure: bytes in, values out, the time an argument.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pdserve.rpc.errors import InvalidRequest, PdserveError, TicketExpired, TicketForged, Unauthenticated
from pdserve.runtime.signing import Kind, Signer

MAX_FRAME = 64 << 10
"""Bytes of the longest frame that is looked at."""

LIFETIME = 30.0
"""Seconds for which a beat's tag is good; more than the clocks of two hosts may differ."""

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Role = Literal["prefill", "decode", "both"]
State = Literal["ready", "draining", "bye"]


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of ours says about itself every second. Unknown keys are ignored."""

    # Stock MORI-IO keys.
    type: Literal["P", "D"]
    """"P" for role "prefill", else "D"."""
    http_address: str
    """What a stock proxy knows an instance by; ours repeats `grpc_address`."""
    zmq_address: str
    """Stock form `host:IP,handshake:PORT,notify:PORT`; our ports are 0, no peer dials them."""
    dp_size: Positive
    tp_size: Positive
    transfer_mode: Literal["READ", "WRITE"]
    """Of stock instances; ours take the mode from each request."""

    # Ours.
    engine_id: Name
    """UUID, fresh at every start."""
    grpc_address: Name
    """`host:port` or `unix:path` at which the proxy reaches the service."""
    locator: bytes
    """Signed (Kind.LOCATOR) and renewed with every beat; goes to the other leg unread."""
    model: Name
    """Name that clients ask for."""
    tokenizer: Name
    """A folder with tokenizer.json, or "bytes"."""
    role: Role
    identity: dict[str, str]
    """Equal for engines that may exchange KV."""
    max_model_len: Positive
    """Prompt and answer together, tokens."""
    block_size: Positive
    """Tokens of one KV block."""
    total_kv_tokens: Count
    free_kv_tokens: Count
    running: Count
    """Requests in the engine's batch."""
    waiting: Count
    """Requests queued in the engine."""
    steps: Count
    """Engine steps since start; standing still while work waits means a stuck engine."""
    state: State
    beat: Positive
    """Sequence number within `engine_id`, from 1."""
    sent_at: float
    """Unix seconds of the sender's clock."""
    vocab_size: Count = 0
    """Token ids are below it; 0: not told."""
    layout: str = ""
    """How its KV lies, in words: for whoever reads why two engines do not fit."""
    kvd_draining: bool = False
    """Its kvd takes no new hand-overs; the engine itself computes."""


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """A stock MORI-IO instance: listed, not routed to."""

    type: str
    """"P", "D", or "HELLO" of older versions."""
    http_address: Name
    zmq_address: str = ""
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy's answer to one Beat."""

    ok: bool
    reason: str = ""
    """UPPER_SNAKE of pdserve.rpc.errors where not ok."""
    detail: str = ""
    """For people."""
    beat: Count = 0
    """Sequence number of the beat that is answered; 0 where it could not be read."""


_beats = msgspec.msgpack.Decoder(Beat)
_foreigners = msgspec.msgpack.Decoder(Foreign)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(beat: Beat, signer: Signer) -> bytes:
    """The signed frame of a beat; its tag is good for LIFETIME after `sent_at`."""
    fields = msgspec.structs.asdict(beat)
    fields["auth"] = signer.sign(Kind.BEAT, _digest(fields), beat.sent_at + LIFETIME)
    return msgspec.msgpack.encode(fields)


def decode(frame: bytes, signer: Signer, now: float) -> Beat | Foreign:
    """Reads a frame at `now` (unix seconds). Keys that this version does not know are covered by
    the tag and then ignored.

    Raises:
        InvalidRequest: not a map, too long, or a field that is missing or of a wrong type.
        Unauthenticated: an engine of ours whose tag is absent, of another key, or over.
    """
    if len(frame) > MAX_FRAME:
        raise InvalidRequest(f"registration of {len(frame)} bytes, at most {MAX_FRAME} are read")
    try:
        fields: Any = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"registration is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("registration is not a map")
    if "engine_id" not in fields:
        return _typed(_foreigners, frame)
    verify(fields, signer, now)
    return _typed(_beats, frame)


def verify(fields: Mapping[Any, Any], signer: Signer, now: float) -> None:
    """Checks the tag of a decoded map.

    Raises:
        Unauthenticated: absent, signed under another key, or over at `now`.
    """
    auth = fields.get("auth")
    if not isinstance(auth, bytes):
        raise Unauthenticated("registration carries no authentication tag")
    try:
        digest = signer.verify(Kind.BEAT, auth, now)
    except TicketForged as error:
        raise Unauthenticated("registration is not signed under this cluster's key") from error
    except TicketExpired as error:
        raise Unauthenticated(f"registration is too old: {error}; compare the hosts' clocks") from error
    if digest != _digest({name: value for name, value in fields.items() if name != "auth"}):
        raise Unauthenticated("registration was changed after it was signed")


def encode_reply(reply: Reply) -> bytes:
    """The frame of a reply."""
    return msgspec.msgpack.encode(reply)


def decode_reply(frame: bytes) -> Reply:
    """Reads a reply.

    Raises:
        InvalidRequest: not a reply.
    """
    return _typed(_replies, frame)


def refusal(error: PdserveError, beat: int = 0) -> Reply:
    """The reply that says why a beat was not taken."""
    return Reply(ok=False, reason=error.reason, detail=error.message, beat=beat)


def _digest(fields: Mapping[Any, Any]) -> bytes:
    # Maps keep their order from the sender's encoder to ours, so equal maps are equal bytes.
    return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()


def _typed(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"registration: {error}") from error
