"""The Prefill servicer: decode, call, encode."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.engine.hosting import wire
from pdserve.engine.hosting.stamps import Cut, Progress
from pdserve.engine.hosting.told import about_call
from pdserve.prefill.session import Ask, Prefiller, Ready, Released
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock

NAME = "pdserve.api.prefill.v1.Prefill"


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """See prefill.proto."""

    def __init__(self, prefiller: Prefiller, calls: Calls, clock: Clock) -> None:
        self._prefiller = prefiller
        self._calls = calls
        self._clock = clock

    async def Prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """One prompt; see prefill.proto."""
        progress = Progress({Cut.PREFILL_RECEIVED: self._clock.monotonic_ns()})
        about_call(context, request.request_id, request.transfer_id)
        work = self._prefiller.run(request.transfer_id, lambda: _decode(request), progress)
        try:
            async for event in self._calls.stream(context, work):
                yield _encode(event)
        except Exception:  # it is told as it is; the caller also hears how far it came
            context.set_trailing_metadata(wire.progress(progress, self._clock.monotonic_ns()))
            raise


def _decode(request: prefill_pb2.PrefillRequest) -> Ask:
    return Ask(
        request_id=request.request_id,
        transfer_id=request.transfer_id,
        mode=wire.mode(request.mode),
        prompt=tuple(request.prompt_token_ids),
        sampling=wire.sampling(request.sampling),
        peer_locator=request.peer_locator,
        consumers=request.consumers,
    )


def _encode(event: Ready | Released) -> prefill_pb2.PrefillResponse:
    if isinstance(event, Released):
        return prefill_pb2.PrefillResponse(released=prefill_pb2.Released(transfer=wire.facts(event.facts)))
    ready = prefill_pb2.Ready(
        ticket=event.ticket,
        first_token_id=event.first_token_id,
        cached_tokens=event.cached_tokens,
        stamps=wire.stamps(event.stamps),
    )
    return prefill_pb2.PrefillResponse(ready=ready)
