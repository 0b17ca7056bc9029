"""Attach messages as protobuf, once each way."""

import os

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
    Response,
    Retract,
    Welcome,
)
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import PdserveError

_MODES = {Mode.READ: common_pb2.TRANSFER_MODE_READ, Mode.WRITE: common_pb2.TRANSFER_MODE_WRITE}
_PARTICIPANTS = {
    Participant.HOST: kvd_pb2.PARTICIPANT_HOST,
    Participant.SCHEDULER: kvd_pb2.PARTICIPANT_SCHEDULER,
    Participant.WORKER: kvd_pb2.PARTICIPANT_WORKER,
}
_OUTCOMES = {
    kvd_pb2.OUTCOME_RELEASED: Outcome.RELEASED,
    kvd_pb2.OUTCOME_LANDED: Outcome.LANDED,
    kvd_pb2.OUTCOME_FAILED: Outcome.FAILED,
    kvd_pb2.OUTCOME_CANCELLED: Outcome.CANCELLED,
    kvd_pb2.OUTCOME_EXPIRED: Outcome.EXPIRED,
}


def encode_hello(hello: Hello) -> kvd_pb2.AttachRequest:
    """The first message of a stream."""
    return kvd_pb2.AttachRequest(
        hello=kvd_pb2.Hello(
            engine_id=hello.engine_id,
            participant=_PARTICIPANTS[hello.participant],
            rank=hello.rank,
            pid=os.getpid(),
            ranks=hello.ranks,
            protocol=hello.protocol,
            identity=dict(hello.identity),
        )
    )


def encode(message: Request) -> kvd_pb2.AttachRequest:
    """Any later message."""
    match message:
        case Begin():
            return kvd_pb2.AttachRequest(
                begin=kvd_pb2.Begin(
                    handle=message.handle,
                    transfer_id=message.transfer_id,
                    mode=_MODES[message.mode],
                    consumers=message.consumers,
                )
            )
        case Offer():
            return kvd_pb2.AttachRequest(
                offer=kvd_pb2.Offer(
                    handle=message.handle,
                    transfer_id=message.transfer_id,
                    attempt=message.attempt,
                    block_ids=message.block_ids,
                    tokens=message.tokens,
                    mode=_MODES[message.mode],
                    consumers=message.consumers,
                    stamped_ns=message.stamped_ns,
                )
            )
        case Accept():
            accept = kvd_pb2.Accept(
                handle=message.handle,
                transfer_id=message.transfer_id,
                consumer=message.consumer,
                block_ids=message.block_ids,
                first_block=message.first_block,
                stamped_ns=message.stamped_ns,
            )
            if message.ticket:
                accept.ticket = message.ticket
            else:
                accept.peer_locator = message.peer_locator
            return kvd_pb2.AttachRequest(accept=accept)
        case Retract():
            return kvd_pb2.AttachRequest(
                retract=kvd_pb2.Retract(
                    handle=message.handle, attempt=message.attempt, final=message.final, reason=message.reason
                )
            )
        case Cancel():
            return kvd_pb2.AttachRequest(cancel=kvd_pb2.Cancel(transfer_id=message.transfer_id, reason=message.reason))
        case Renew():
            return kvd_pb2.AttachRequest(renew=kvd_pb2.Renew(transfer_ids=message.transfer_ids))


def decode(message: kvd_pb2.AttachResponse) -> Response:
    """What kvd said.

    Raises:
        PdserveError: a message or an outcome that this version does not know.
    """
    match message.WhichOneof("message"):
        case "end":
            return _end(message.end)
        case "fenced":
            return Fenced(message.fenced.handle, message.fenced.attempt)
        case "welcome":
            welcome = message.welcome
            return Welcome(
                kvd_epoch=welcome.kvd_epoch,
                notice_endpoint=welcome.notice_endpoint,
                memory_socket=welcome.memory_socket,
                lease_s=welcome.lease_ms / 1000,
                renew_s=welcome.renew_ms / 1000,
                fence_s=welcome.fence_ms / 1000,
                peer_address=welcome.peer_address,
                draining=welcome.draining,
            )
        case unknown:
            raise PdserveError(f"kvd sent a message that this client does not know: {unknown}")


def _end(end: kvd_pb2.End) -> End:
    outcome = _OUTCOMES.get(end.outcome)
    if outcome is None:
        raise PdserveError(f"kvd ended {end.handle} with outcome {end.outcome}, which this client does not know")
    facts = end.facts
    return End(
        handle=end.handle,
        transfer_id=end.transfer_id,
        outcome=outcome,
        reason=end.reason,
        detail=end.detail,
        facts=Facts(
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
        ),
        producer=end.producer,
        consumer=end.consumer,
    )
