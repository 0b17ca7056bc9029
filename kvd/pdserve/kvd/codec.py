"""Attach messages as the daemon reads and writes them; the client's codec is the other side."""

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.client.messages import (
    Accept,
    Begin,
    Cancel,
    End,
    Facts,
    Fenced,
    Hello,
    Offer,
    Outcome,
    Participant,
    Renew,
    Request,
    Retract,
    Welcome,
)
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest

_MODES = {common_pb2.TRANSFER_MODE_READ: Mode.READ, common_pb2.TRANSFER_MODE_WRITE: Mode.WRITE}
_PARTICIPANTS = {
    kvd_pb2.PARTICIPANT_HOST: Participant.HOST,
    kvd_pb2.PARTICIPANT_SCHEDULER: Participant.SCHEDULER,
    kvd_pb2.PARTICIPANT_WORKER: Participant.WORKER,
}
_OUTCOMES = {
    Outcome.RELEASED: kvd_pb2.OUTCOME_RELEASED,
    Outcome.LANDED: kvd_pb2.OUTCOME_LANDED,
    Outcome.FAILED: kvd_pb2.OUTCOME_FAILED,
    Outcome.CANCELLED: kvd_pb2.OUTCOME_CANCELLED,
    Outcome.EXPIRED: kvd_pb2.OUTCOME_EXPIRED,
}


def decode_hello(message: kvd_pb2.AttachRequest) -> tuple[Hello, int]:
    """The first message of a stream, and the caller's pid.

    Raises:
        InvalidRequest: not a hello, or of no known participant.
    """
    if message.WhichOneof("message") != "hello":
        raise InvalidRequest("the first message of Attach is hello")
    hello = message.hello
    participant = _PARTICIPANTS.get(hello.participant)
    if participant is None:
        raise InvalidRequest(f"participant {hello.participant}")
    known = Hello(hello.engine_id, participant, dict(hello.identity), hello.ranks, hello.rank, hello.protocol)
    return known, hello.pid


def decode(message: kvd_pb2.AttachRequest) -> Request:
    """Any later message.

    Raises:
        InvalidRequest: empty, a second hello, or without a mode.
    """
    match message.WhichOneof("message"):
        case "begin":
            begin = message.begin
            return Begin(begin.handle, begin.transfer_id, _mode(begin.mode), begin.consumers)
        case "offer":
            offer = message.offer
            return Offer(
                offer.handle,
                offer.transfer_id,
                offer.attempt,
                tuple(offer.block_ids),
                offer.tokens,
                _mode(offer.mode),
                offer.consumers,
                offer.stamped_ns,
            )
        case "accept":
            accept = message.accept
            return Accept(
                accept.handle,
                accept.transfer_id,
                accept.consumer,
                tuple(accept.block_ids),
                accept.first_block,
                accept.ticket,
                accept.peer_locator,
                accept.stamped_ns,
            )
        case "retract":
            retract = message.retract
            return Retract(retract.handle, retract.attempt, retract.final, retract.reason)
        case "cancel":
            return Cancel(message.cancel.transfer_id, message.cancel.reason)
        case "renew":
            return Renew(tuple(message.renew.transfer_ids))
        case other:
            raise InvalidRequest(f"an Attach message that is {other or 'empty'}")


def _mode(value: "common_pb2.TransferMode.ValueType") -> Mode:
    mode = _MODES.get(value)
    if mode is None:
        raise InvalidRequest("a begin or offer without a mode")
    return mode


def encode_welcome(welcome: Welcome) -> kvd_pb2.AttachResponse:
    """kvd's answer to a hello."""
    return kvd_pb2.AttachResponse(
        welcome=kvd_pb2.Welcome(
            kvd_epoch=welcome.kvd_epoch,
            notice_endpoint=welcome.notice_endpoint,
            memory_socket=welcome.memory_socket,
            lease_ms=round(welcome.lease_s * 1000),
            renew_ms=round(welcome.renew_s * 1000),
            fence_ms=round(welcome.fence_s * 1000),
            peer_address=welcome.peer_address,
            draining=welcome.draining,
        )
    )


def encode(message: End | Fenced | Welcome) -> kvd_pb2.AttachResponse:
    """Any later answer."""
    if isinstance(message, Welcome):
        return encode_welcome(message)
    if isinstance(message, Fenced):
        return kvd_pb2.AttachResponse(fenced=kvd_pb2.Fenced(handle=message.handle, attempt=message.attempt))
    end = kvd_pb2.End(
        handle=message.handle,
        transfer_id=message.transfer_id,
        outcome=_OUTCOMES[message.outcome],
        reason=message.reason,
        detail=message.detail,
        producer=message.producer,
        consumer=message.consumer,
    )
    if message.facts != Facts():  # of a good end all, of a bad one how far it had come
        facts = message.facts
        end.facts.CopyFrom(
            common_pb2.TransferFacts(
                kv_bytes=facts.kv_bytes,
                blocks=facts.blocks,
                layers=facts.layers,
                ranks=facts.ranks,
                copy_ns=facts.copy_ns,
                transport=facts.transport,
                lanes=facts.lanes,
                first_post_ns=facts.first_post_ns,
                landed_ns=facts.landed_ns,
                overlapped_bytes=facts.overlapped_bytes,
                offered_ns=facts.offered_ns,
                accepted_ns=facts.accepted_ns,
                last_byte_ns=facts.last_byte_ns,
            )
        )
    return kvd_pb2.AttachResponse(end=end)
