"""The Decode servicer: decode, call, encode."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.decode.messages import Ask, Finished, Source, Tokens
from pdserve.decode.session import Decoder
from pdserve.engine.hosting import wire
from pdserve.engine.hosting.stamps import Cut, Progress
from pdserve.engine.hosting.told import about_call
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import InvalidRequest
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock

NAME = "pdserve.api.decode.v1.Decode"

_RECOMPUTE: dict[int, bool | None] = {
    common_pb2.FAILURE_POLICY_UNSPECIFIED: None,
    common_pb2.FAILURE_POLICY_FAIL: False,
    common_pb2.FAILURE_POLICY_RECOMPUTE: True,
}


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """See decode.proto."""

    def __init__(self, decoder: Decoder, calls: Calls, clock: Clock) -> None:
        self._decoder = decoder
        self._calls = calls
        self._clock = clock

    async def Decode(
        self,
        request: decode_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """One prompt; see decode.proto."""
        progress = Progress({Cut.DECODE_RECEIVED: self._clock.monotonic_ns()})
        transfer_id = request.source.transfer_id if request.HasField("source") else None
        about_call(context, request.request_id, transfer_id or b"")
        work = self._decoder.run(transfer_id, lambda: _decode(request), progress)
        try:
            async for event in self._calls.stream(context, work):
                yield _encode(event)
        except Exception:  # it is told as it is; the caller also hears how far it came
            context.set_trailing_metadata(wire.progress(progress, self._clock.monotonic_ns()))
            raise


def _decode(request: decode_pb2.DecodeRequest) -> Ask:
    if request.on_failure not in _RECOMPUTE:
        raise InvalidRequest(f"on_failure is {request.on_failure}, which this version does not know")
    return Ask(
        request_id=request.request_id,
        prompt=tuple(request.prompt_token_ids),
        sampling=wire.sampling(request.sampling),
        answers=wire.answers(request.sampling),
        source=_source(request.source) if request.HasField("source") else None,
        recompute=_RECOMPUTE[request.on_failure],
    )


def _source(source: decode_pb2.KvSource) -> Source:
    mode = wire.mode(source.mode)
    wanted = "ticket" if mode is Mode.READ else "peer_locator"
    given = source.WhichOneof("from")
    if given != wanted:
        raise InvalidRequest(f"a {mode.value.upper()} needs a {wanted}, got {given or 'none'}")
    return Source(source.transfer_id, mode, source.ticket, source.peer_locator)


def _encode(event: Tokens | Finished) -> decode_pb2.DecodeResponse:
    if isinstance(event, Finished):
        return decode_pb2.DecodeResponse(
            finished=decode_pb2.Finished(
                completion_tokens=event.completion_tokens,
                cached_tokens=event.cached_tokens,
                recomputed_tokens=event.recomputed_tokens,
                transfer=wire.facts(event.facts) if event.facts else None,
            )
        )
    return decode_pb2.DecodeResponse(
        tokens=decode_pb2.Tokens(
            index=event.index,
            text=event.text,
            token_ids=event.token_ids,
            logprobs=wire.logprobs(event.logprobs),
            finish_reason=wire.finish(event.finish),
            stop_reason=event.stop_reason,
            stamps=wire.stamps(event.stamps) if event.stamps else None,
        )
    )
