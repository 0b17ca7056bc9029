"""Between the SDK's values and the wire's messages, both ways; what cannot be said on the wire is refused here."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message as WireMessage

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import _types as t
from pdserve.rpc import errors

Prompt = str | Sequence[int]
Messages = Iterable[t.Message | Mapping[str, str]]


_MODES: Mapping[str, Any] = {
    "read": common_pb2.TRANSFER_MODE_READ,
    "write": common_pb2.TRANSFER_MODE_WRITE,
}
_ROUTES: Mapping[str, Any] = {
    "split": serving_pb2.ROUTE_POLICY_SPLIT,
    "split_or_colocated": serving_pb2.ROUTE_POLICY_SPLIT_OR_COLOCATED,
    "colocated": serving_pb2.ROUTE_POLICY_COLOCATED,
}
_POLICIES: Mapping[str, Any] = {
    "fail": common_pb2.FAILURE_POLICY_FAIL,
    "recompute": common_pb2.FAILURE_POLICY_RECOMPUTE,
}
_MODE_NAMES: Mapping[int, t.Mode] = {
    common_pb2.TRANSFER_MODE_READ: "read",
    common_pb2.TRANSFER_MODE_WRITE: "write",
}
_FINISH_NAMES: Mapping[int, t.FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_ROLE_NAMES: Mapping[int, t.Role] = {
    common_pb2.ENGINE_ROLE_PREFILL: "prefill",
    common_pb2.ENGINE_ROLE_DECODE: "decode",
    common_pb2.ENGINE_ROLE_BOTH: "both",
}
_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(t.Sampling))


def request(
    *,
    prompt: Prompt | None = None,
    messages: Messages | None = None,
    model: str,
    sampling: t.Sampling | None,
    fields: Mapping[str, Any],
    mode: t.Mode | None,
    route: t.Route | None,
    on_failure: t.FailurePolicy | None,
    request_id: str,
) -> serving_pb2.GenerateRequest:
    """One GenerateRequest, from `prompt` or else from `messages`. `fields` go over `sampling`.

    Raises:
        EmptyPrompt: no character, no token or no message.
        InvalidRequest: a value that the wire cannot carry, by name.
    """
    wire = serving_pb2.GenerateRequest()
    _set(wire, "request_id", request_id)
    _set(wire, "model", model)
    if messages is not None:
        _fill_chat(wire.chat, messages)
    else:
        _fill_prompt(wire, prompt)
    _fill_sampling(wire.sampling, sampling or t.Sampling(), fields)
    wire.mode = _word("mode", mode, _MODES)
    wire.route = _word("route", route, _ROUTES)
    wire.on_failure = _word("on_failure", on_failure, _POLICIES)
    return wire


def delta(wire: serving_pb2.Delta) -> t.Delta:
    """One delta."""
    return t.Delta(
        index=wire.index,
        text=wire.text,
        token_ids=tuple(wire.token_ids),
        logprobs=tuple(
            t.PositionLogprobs(_candidate(p.sampled), tuple(_candidate(c) for c in p.top)) for p in wire.logprobs
        ),
        finish_reason=_FINISH_NAMES.get(wire.finish_reason),
        stop_reason=wire.stop_reason,
    )


def completion(
    started: serving_pb2.Started, choices: tuple[t.Choice, ...], finished: serving_pb2.Finished
) -> t.Completion:
    """The whole answer, from the stream's first and last event and what lay between."""
    return t.Completion(
        request_id=started.request_id,
        trace_id=started.trace_id,
        model=started.model,
        choices=choices,
        usage=t.Usage(
            prompt_tokens=finished.usage.prompt_tokens,
            cached_tokens=finished.usage.cached_tokens,
            completion_tokens=finished.usage.completion_tokens,
        ),
        timings=t.Timings(
            ttft_seconds=finished.timings.ttft_seconds,
            parts=MappingProxyType({part.name: part.seconds for part in finished.timings.parts}),
            unattributed_seconds=finished.timings.unattributed_seconds,
            e2e_seconds=finished.timings.e2e_seconds,
        ),
        mode=_MODE_NAMES.get(finished.mode),
        transfer=_transfer(finished.transfer) if finished.HasField("transfer") else None,
        recomputed_tokens=finished.recomputed_tokens,
        fallbacks=finished.fallbacks,
        prefill_engine_id=finished.prefill_engine_id,
        decode_engine_id=finished.decode_engine_id,
        continuations=finished.continuations,
    )


def models(wire: serving_pb2.ListModelsResponse) -> tuple[t.Model, ...]:
    """The models, in the proxy's order."""
    return tuple(t.Model(m.id, m.max_model_len) for m in wire.models)


def topology(wire: serving_pb2.GetTopologyResponse) -> t.Topology:
    """The engines and the proxy's counters."""
    engines = tuple(
        t.Engine(
            engine_id=e.engine_id,
            role=_ROLE_NAMES.get(e.role, "unknown"),
            model=e.model,
            address=e.address,
            state=e.state,
            free_kv_tokens=e.free_kv_tokens,
            total_kv_tokens=e.total_kv_tokens,
            running=e.running,
            waiting=e.waiting,
            beat_age_seconds=e.beat_age_seconds,
            excluded_because=e.excluded_because,
        )
        for e in wire.engines
    )
    return t.Topology(engines, _MODE_NAMES.get(wire.default_mode), wire.queued, wire.in_flight)


def _fill_prompt(wire: serving_pb2.GenerateRequest, prompt: Prompt | None) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise errors.EmptyPrompt("the prompt has no character")
        _set(wire, "text", prompt, named="prompt")
        return
    if prompt is None or isinstance(prompt, bytes):
        raise errors.InvalidRequest("a prompt is a string or a sequence of token ids")
    ids = list(prompt)
    if not ids:
        raise errors.EmptyPrompt("the prompt has no token")
    _extend(wire.token_ids, "ids", ids, named="prompt")


def _fill_chat(chat: serving_pb2.ChatPrompt, messages: Messages) -> None:
    for message in messages:
        if isinstance(message, t.Message):
            role, content = message.role, message.content
        else:
            if set(message) != {"role", "content"}:
                raise errors.InvalidRequest(f"a message has a role and a content, not {sorted(message)}")
            role, content = message["role"], message["content"]
        turn = chat.messages.add()
        _set(turn, "role", role, named="messages.role")
        _set(turn, "content", content, named="messages.content")
    if not chat.messages:
        raise errors.EmptyPrompt("the conversation has no message")


def _fill_sampling(wire: common_pb2.SamplingParams, base: t.Sampling, fields: Mapping[str, Any]) -> None:
    unknown = sorted(set(fields) - set(_SAMPLING_FIELDS))
    if unknown:
        raise errors.UnknownField(f"no such sampling parameter: {', '.join(unknown)}", fields=",".join(unknown))
    for name in _SAMPLING_FIELDS:
        value = fields.get(name, getattr(base, name))
        if value is None:
            continue
        if name in ("stop", "stop_token_ids"):
            _extend(wire, name, [value] if isinstance(value, str) else value)
        elif name in ("max_tokens", "n") and isinstance(value, int) and value < 1:
            raise errors.InvalidRequest(f"{name} is {value}: at least 1", field=name)
        else:
            _set(wire, name, value)


def _set(wire: WireMessage, name: str, value: Any, *, named: str = "") -> None:
    try:
        setattr(wire, name, value)
    except (TypeError, ValueError) as error:  # protobuf's range, type and UTF-8 checks
        raise _refusal(named or name, error) from error


def _extend(wire: WireMessage, name: str, values: Any, *, named: str = "") -> None:
    try:
        getattr(wire, name).extend(values)
    except (TypeError, ValueError) as error:
        raise _refusal(named or name, error) from error


def _refusal(name: str, error: Exception) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name}: {error}", field=name)


def _word(name: str, value: str | None, words: Mapping[str, Any]) -> Any:
    if value is None:
        return 0
    if value not in words:
        raise errors.InvalidRequest(f"{name} is {value!r}: one of {', '.join(words)}", field=name)
    return words[value]


def _candidate(wire: common_pb2.TokenLogprob) -> t.TokenLogprob:
    return t.TokenLogprob(wire.token_id, wire.token, wire.logprob)


def _transfer(wire: common_pb2.TransferFacts) -> t.Transfer:
    return t.Transfer(
        kv_bytes=wire.kv_bytes,
        blocks=wire.blocks,
        layers=wire.layers,
        ranks=wire.ranks,
        transport=wire.transport,
        copy_seconds=wire.copy_ns / 1e9,
        span_seconds=max(0, wire.landed_ns - wire.first_post_ns) / 1e9,
        overlapped_bytes=wire.overlapped_bytes,
        lanes=wire.lanes,
    )
