"""The gRPC face: decodes, calls, encodes."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy import codec
from pdserve.proxy.inference import Inference
from pdserve.proxy.types import (
    Ask,
    Chat,
    Delta,
    Event,
    Finished,
    Mode,
    OnFailure,
    Prompt,
    Route,
    Started,
    Timings,
    TokenIds,
    Turn,
)
from pdserve.rpc.errors import EmptyPrompt, InvalidRequest, UnknownField

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_MODES: Mapping[int, Mode | None] = {number: mode for mode, number in codec.MODE_TO_WIRE.items()}
_ROUTES: Mapping[int, Route | None] = {
    serving_pb2.ROUTE_POLICY_UNSPECIFIED: None,
    serving_pb2.ROUTE_POLICY_SPLIT: Route.SPLIT,
    serving_pb2.ROUTE_POLICY_SPLIT_OR_COLOCATED: Route.SPLIT_OR_COLOCATED,
    serving_pb2.ROUTE_POLICY_COLOCATED: Route.COLOCATED,
}
_POLICIES: Mapping[int, OnFailure | None] = {
    common_pb2.FAILURE_POLICY_UNSPECIFIED: None,
    common_pb2.FAILURE_POLICY_FAIL: OnFailure.FAIL,
    common_pb2.FAILURE_POLICY_RECOMPUTE: OnFailure.RECOMPUTE,
}
_ROLES = {
    "prefill": common_pb2.ENGINE_ROLE_PREFILL,
    "decode": common_pb2.ENGINE_ROLE_DECODE,
    "both": common_pb2.ENGINE_ROLE_BOTH,
}


class InferenceService(serving_pb2_grpc.InferenceServicer):
    """pdserve.api.serving.v1.Inference."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def Generate(
        self, request: serving_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[serving_pb2.GenerateResponse]:
        """See serving.proto."""
        received = self._inference.clock.monotonic_ns()
        with self._inference.taking():
            job = await self._inference.prepare(ask_from_wire(request, context), received)
        # gRPC may drop this generator without closing it: the end of the call is the sure sign.
        call: Any = context  # types-grpcio wants a class of its own for the callback
        call.add_done_callback(lambda _: job.cancel())
        async with contextlib.aclosing(self._inference.run(job)) as events:
            async for event in events:
                yield event_to_wire(event)

    async def ListModels(
        self, request: serving_pb2.ListModelsRequest, context: Context
    ) -> serving_pb2.ListModelsResponse:
        """See serving.proto."""
        refuse_unknown(request)
        models = [serving_pb2.Model(id=m.id, max_model_len=m.max_model_len) for m in self._inference.models()]
        return serving_pb2.ListModelsResponse(models=models)

    async def GetTopology(
        self, request: serving_pb2.GetTopologyRequest, context: Context
    ) -> serving_pb2.GetTopologyResponse:
        """See serving.proto."""
        refuse_unknown(request)
        topology = self._inference.topology()
        engines = [
            serving_pb2.EngineStatus(
                engine_id=line.engine_id,
                role=_ROLES.get(line.role, common_pb2.ENGINE_ROLE_UNSPECIFIED),
                model=line.model,
                address=line.address,
                state=line.state,
                free_kv_tokens=line.free_kv_tokens,
                total_kv_tokens=line.total_kv_tokens,
                running=line.running,
                waiting=line.waiting,
                beat_age_seconds=line.beat_age_seconds,
                excluded_because=line.excluded_because,
            )
            for line in topology.engines
        ]
        return serving_pb2.GetTopologyResponse(
            engines=engines,
            default_mode=codec.MODE_TO_WIRE[topology.default_mode],
            queued=topology.queued,
            in_flight=topology.in_flight,
        )


def ask_from_wire(request: serving_pb2.GenerateRequest, context: Context) -> Ask:
    """A decoded request with the call's deadline and trace.

    Raises:
        UnknownField: a field that this version does not have.
        EmptyPrompt: no prompt is set.
        InvalidRequest: an enum value that this version does not have.
    """
    refuse_unknown(request)
    timeout = context.time_remaining()
    return Ask(
        prompt=_prompt(request),
        request_id=request.request_id,
        model=request.model,
        sampling=codec.sampling_from_wire(request.sampling),
        mode=_known("mode", _MODES, request.mode),
        route=_known("route", _ROUTES, request.route),
        on_failure=_known("on_failure", _POLICIES, request.on_failure),
        timeout=max(timeout, 0.001) if timeout is not None else None,
        traceparent=_traceparent(context),
    )


def refuse_unknown(message: Message, path: str = "") -> None:
    """Fields that the API does not have are refused, in sub-messages too: a misspelt or newer
    parameter must not be dropped in silence.

    Raises:
        UnknownField: names where it is, and its number.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        where = path or message.DESCRIPTOR.name
        raise UnknownField(f"{where} has no field {number} in this version", param=f"{where}.{number}")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        name = f"{path}.{field.name}" if path else field.name
        for inner in (value,) if isinstance(value, Message) else value:
            refuse_unknown(inner, name)


def event_to_wire(event: Event) -> serving_pb2.GenerateResponse:
    """One message a event."""
    if isinstance(event, Delta):
        return serving_pb2.GenerateResponse(
            delta=serving_pb2.Delta(
                index=event.index,
                text=event.text,
                token_ids=event.token_ids,
                logprobs=codec.positions_to_wire(event.logprobs) if event.logprobs else None,
                finish_reason=codec.FINISH_TO_WIRE[event.finish],
                stop_reason=event.stop_reason,
            )
        )
    if isinstance(event, Started):
        return serving_pb2.GenerateResponse(
            started=serving_pb2.Started(
                request_id=event.request_id,
                trace_id=event.trace_id,
                model=event.model,
                mode=codec.MODE_TO_WIRE[event.mode],
            )
        )
    return serving_pb2.GenerateResponse(finished=_finished(event))


def _finished(event: Finished) -> serving_pb2.Finished:
    return serving_pb2.Finished(
        usage=serving_pb2.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            cached_tokens=event.usage.cached_tokens,
            completion_tokens=event.usage.completion_tokens,
        ),
        timings=_timings(event.timings),
        transfer=codec.facts_to_wire(event.transfer) if event.transfer else None,
        mode=codec.MODE_TO_WIRE[event.mode],
        recomputed_tokens=event.recomputed_tokens,
        fallbacks=event.fallbacks,
        continuations=event.continuations,
        prefill_engine_id=event.prefill_engine_id,
        decode_engine_id=event.decode_engine_id,
    )


def _timings(timings: Timings) -> serving_pb2.Timings:
    return serving_pb2.Timings(
        ttft_seconds=timings.ttft,
        parts=[serving_pb2.TimingPart(name=name, seconds=value) for name, value in timings.parts.items()],
        unattributed_seconds=timings.unattributed,
        e2e_seconds=timings.e2e,
    )


def _prompt(request: serving_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "chat":
        return Chat(tuple(Turn(message.role, message.content) for message in request.chat.messages))
    if kind == "token_ids":
        return TokenIds(tuple(request.token_ids.ids))
    raise EmptyPrompt("the request has no prompt", param="prompt")


def _known(name: str, table: Mapping[int, T], value: int) -> T:
    if value not in table:
        raise InvalidRequest(f"{name} has no value {value} in this version", param=name)
    return table[value]


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
