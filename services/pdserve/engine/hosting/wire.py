"""Protobuf to the engine's words and back, for both services. Refuses what no engine could mean."""

import math
from collections.abc import Iterable

from pdserve.api.common.v1 import common_pb2
from pdserve.engine.hosting.stamps import Progress, Stamps
from pdserve.engine.port import Candidate, Finish, Position, Sampling
from pdserve.kvd.client.messages import Facts
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest
from pdserve.rpc.status import PROGRESS_KEY
from pdserve.runtime.clock import boot_id

MAX_ANSWERS = 128
"""Most answers to one prompt."""

_MODES = {common_pb2.TRANSFER_MODE_READ: Mode.READ, common_pb2.TRANSFER_MODE_WRITE: Mode.WRITE}
_FINISHES = {Finish.STOP: common_pb2.FINISH_REASON_STOP, Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH}


def mode(value: common_pb2.TransferMode.ValueType) -> Mode:
    """Raises InvalidRequest for unspecified: defaults are the proxy's."""
    if value not in _MODES:
        raise InvalidRequest("mode must be READ or WRITE")
    return _MODES[value]


def answers(message: common_pb2.SamplingParams) -> int:
    """n of a request.

    Raises:
        InvalidRequest: not in 1..MAX_ANSWERS.
    """
    n = message.n if message.HasField("n") else 1
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidRequest(f"n is {n}, not in 1..{MAX_ANSWERS}")
    return n


def sampling(message: common_pb2.SamplingParams) -> Sampling:
    """How to choose tokens.

    Raises:
        InvalidRequest: max_tokens of 0, or a number that is not finite.
    """
    if message.HasField("max_tokens") and message.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1")
    for field in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not math.isfinite(getattr(message, field)):
            raise InvalidRequest(f"{field} is not a finite number")
    return Sampling(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def stamps(taken: Stamps) -> common_pb2.Stamps:
    """Stamps of this host; unknown ones (0) are left out."""
    return common_pb2.Stamps(
        boot_id=boot_id(),
        stamps=[
            common_pb2.Stamp(point=common_pb2.CutPoint.Value(cut.value), monotonic_ns=moment)
            for cut, moment in taken.items()
            if moment
        ],
    )


def progress(made: Progress, ended_ns: int) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata of a call that fails now, at `ended_ns` (monotonic)."""
    message = common_pb2.Progress(
        stamps=stamps(made.stamps),
        unseen=[common_pb2.CutPoint.Value(name) for name in sorted(cut.value for cut in made.unseen)],
        ended_ns=ended_ns,
        transfer=facts(made.facts) if made.facts is not None else None,
    )
    return ((PROGRESS_KEY, message.SerializeToString()),)


def facts(values: Facts) -> common_pb2.TransferFacts:
    """What a hand-over really did."""
    return common_pb2.TransferFacts(
        kv_bytes=values.kv_bytes,
        blocks=values.blocks,
        layers=values.layers,
        ranks=values.ranks,
        copy_ns=values.copy_ns,
        transport=values.transport,
        lanes=values.lanes,
        first_post_ns=values.first_post_ns,
        landed_ns=values.landed_ns,
        overlapped_bytes=values.overlapped_bytes,
        offered_ns=values.offered_ns,
        accepted_ns=values.accepted_ns,
        last_byte_ns=values.last_byte_ns,
    )


def finish(reason: Finish | None) -> common_pb2.FinishReason.ValueType:
    """Unspecified while the answer goes on."""
    return _FINISHES[reason] if reason else common_pb2.FINISH_REASON_UNSPECIFIED


def logprobs(positions: Iterable[Position]) -> list[common_pb2.PositionLogprobs]:
    """Log probabilities, one per token."""
    return [
        common_pb2.PositionLogprobs(
            sampled=_candidate(position.sampled), top=[_candidate(candidate) for candidate in position.top]
        )
        for position in positions
    ]


def _candidate(candidate: Candidate) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=candidate.token_id, token=candidate.token, logprob=candidate.logprob)
