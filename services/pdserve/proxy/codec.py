"""Wire messages to the proxy's nouns and back; the only place besides `service` that knows both."""

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2
from pdserve.api.prefill.v1 import prefill_pb2
from pdserve.proxy.legs import (
    DecodeEvent,
    DecodeOrder,
    Done,
    PrefillEvent,
    PrefillOrder,
    Ready,
    Released,
    Tokens,
)
from pdserve.proxy.types import (
    Candidate,
    Delta,
    Finish,
    Mode,
    Position,
    Progress,
    Sampling,
    Stamps,
    TransferFacts,
)
from pdserve.rpc.errors import PdserveError

MODE_TO_WIRE = {
    Mode.READ: common_pb2.TRANSFER_MODE_READ,
    Mode.WRITE: common_pb2.TRANSFER_MODE_WRITE,
    None: common_pb2.TRANSFER_MODE_UNSPECIFIED,
}
FINISH_TO_WIRE = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
}
_FINISH: dict[int, Finish | None] = {number: finish for finish, number in FINISH_TO_WIRE.items()}
_FACTS = tuple(TransferFacts.__dataclass_fields__)


def sampling_to_wire(sampling: Sampling) -> common_pb2.SamplingParams:
    """Unset stays unset."""
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n,
        logprobs=sampling.logprobs,
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> Sampling:
    """Unset fields are None, or the field's neutral value."""
    m = message
    return Sampling(
        max_tokens=m.max_tokens if m.HasField("max_tokens") else None,
        min_tokens=m.min_tokens,
        temperature=m.temperature if m.HasField("temperature") else None,
        top_p=m.top_p if m.HasField("top_p") else None,
        top_k=m.top_k if m.HasField("top_k") else None,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty if m.HasField("repetition_penalty") else None,
        seed=m.seed if m.HasField("seed") else None,
        stop=tuple(m.stop),
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        n=m.n if m.HasField("n") else 1,
        logprobs=m.logprobs if m.HasField("logprobs") else None,
    )


def prefill_to_wire(order: PrefillOrder) -> prefill_pb2.PrefillRequest:
    """A prefill leg's request."""
    return prefill_pb2.PrefillRequest(
        request_id=order.request_id,
        transfer_id=order.transfer_id,
        mode=MODE_TO_WIRE[order.mode],
        prompt_token_ids=order.prompt,
        sampling=sampling_to_wire(order.sampling),
        peer_locator=order.peer_locator,
        consumers=order.consumers,
    )


def decode_to_wire(order: DecodeOrder) -> decode_pb2.DecodeRequest:
    """A decode leg's request. What follows a failed hand-over is the proxy's to decide, which knows
    other prefill engines and bounds what is computed again; so decode only fails, unless told else."""
    message = decode_pb2.DecodeRequest(
        request_id=order.request_id,
        prompt_token_ids=order.prompt,
        sampling=sampling_to_wire(order.sampling),
        on_failure=common_pb2.FAILURE_POLICY_RECOMPUTE if order.recompute else common_pb2.FAILURE_POLICY_FAIL,
    )
    source = order.source
    if source is not None:
        message.source.transfer_id = source.transfer_id
        message.source.mode = MODE_TO_WIRE[source.mode]
        if source.mode is Mode.READ:
            message.source.ticket = source.ticket
        else:
            message.source.peer_locator = source.peer_locator
    return message


def prefill_event(message: prefill_pb2.PrefillResponse) -> PrefillEvent:
    """Raises PdserveError for an event of a newer service."""
    kind = message.WhichOneof("event")
    if kind == "ready":
        ready = message.ready
        return Ready(ready.ticket, ready.first_token_id, ready.cached_tokens, stamps_from_wire(ready.stamps))
    if kind == "released":
        done = message.released
        return Released(facts_from_wire(done.transfer) if done.HasField("transfer") else None)
    raise PdserveError("the prefill service sent an event that this proxy does not know")


def decode_event(message: decode_pb2.DecodeResponse) -> DecodeEvent:
    """Raises PdserveError for an event of a newer service."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        tokens = message.tokens
        delta = Delta(
            index=tokens.index,
            text=tokens.text,
            token_ids=tuple(tokens.token_ids),
            logprobs=positions_from_wire(tokens.logprobs) if tokens.logprobs else (),
            finish=_FINISH.get(tokens.finish_reason),
            stop_reason=tokens.stop_reason,
        )
        return Tokens(delta, stamps_from_wire(tokens.stamps) if tokens.HasField("stamps") else None)
    if kind == "finished":
        done = message.finished
        return Done(
            done.completion_tokens,
            done.cached_tokens,
            done.recomputed_tokens,
            facts_from_wire(done.transfer) if done.HasField("transfer") else None,
        )
    raise PdserveError("the decode service sent an event that this proxy does not know")


def stamps_from_wire(message: common_pb2.Stamps) -> Stamps:
    """A point stamped twice keeps the last; 0 means that it is not known."""
    return Stamps(message.boot_id, {stamp.point: stamp.monotonic_ns for stamp in message.stamps if stamp.monotonic_ns})


def progress_from_wire(said: bytes) -> Progress | None:
    """None for nothing, and for what is no Progress: an error is told with or without it."""
    if not said:
        return None
    try:
        message = common_pb2.Progress.FromString(said)
    except DecodeError:
        return None
    return Progress(
        stamps_from_wire(message.stamps),
        frozenset(message.unseen),
        message.ended_ns,
        facts_from_wire(message.transfer) if message.HasField("transfer") else None,
    )


def facts_from_wire(message: common_pb2.TransferFacts) -> TransferFacts:
    """Field by field."""
    return TransferFacts(**{name: getattr(message, name) for name in _FACTS})


def facts_to_wire(facts: TransferFacts) -> common_pb2.TransferFacts:
    """Field by field."""
    return common_pb2.TransferFacts(**{name: getattr(facts, name) for name in _FACTS})


def positions_from_wire(messages: Iterable[common_pb2.PositionLogprobs]) -> tuple[Position, ...]:
    """Log probabilities, one a token."""
    return tuple(Position(_candidate(m.sampled), tuple(_candidate(t) for t in m.top)) for m in messages)


def positions_to_wire(positions: Iterable[Position]) -> list[common_pb2.PositionLogprobs]:
    """Log probabilities, one a token."""
    return [
        common_pb2.PositionLogprobs(sampled=_token(p.sampled), top=[_token(candidate) for candidate in p.top])
        for p in positions
    ]


def _candidate(message: common_pb2.TokenLogprob) -> Candidate:
    return Candidate(message.token_id, message.token, message.logprob)


def _token(candidate: Candidate) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=candidate.token_id, token=candidate.token, logprob=candidate.logprob)
