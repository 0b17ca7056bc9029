"""The SDK's values and the wire's messages say the same."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import (
    ContextExceeded,
    EmptyPrompt,
    InvalidRequest,
    Message,
    PdserveError,
    Sampling,
    UnknownField,
    _call,
    _codec,
)
from pdserve.client._assembly import Assembly
from pdserve.client._types import SamplingFields


def build(**fields: Any) -> serving_pb2.GenerateRequest:
    prompt = fields.pop("prompt", "hi")
    return _call.build(fields, prompt=prompt).request


def test_every_sampling_field_of_the_wire_is_a_field_of_sampling() -> None:
    """Sampling, its keyword form and SamplingParams name the same parameters, none missing on either side."""
    wire = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {field.name for field in dataclasses.fields(Sampling)} == wire
    assert set(SamplingFields.__annotations__) == wire


def test_a_request_says_what_was_asked() -> None:
    """Every argument arrives in its field."""
    request = build(
        model="m",
        mode="write",
        route="split",
        on_failure="fail",
        request_id="r",
        max_tokens=5,
        temperature=0.0,
        stop="END",
        stop_token_ids=[7, 8],
        n=2,
        seed=-1,
        logprobs=0,
    )
    assert (request.text, request.model, request.request_id) == ("hi", "m", "r")
    assert request.mode == common_pb2.TRANSFER_MODE_WRITE
    assert request.route == serving_pb2.ROUTE_POLICY_SPLIT
    assert request.on_failure == common_pb2.FAILURE_POLICY_FAIL
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.n, sampling.seed) == (5, 2, -1)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["END"], [7, 8])
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0
    assert sampling.HasField("logprobs")
    assert not sampling.HasField("top_p")


def test_what_is_not_asked_is_left_to_the_deployment() -> None:
    """Absent arguments leave their fields unset, so the proxy's defaults hold."""
    request = build()
    assert request.mode == common_pb2.TRANSFER_MODE_UNSPECIFIED
    assert request.route == serving_pb2.ROUTE_POLICY_UNSPECIFIED
    assert request.on_failure == common_pb2.FAILURE_POLICY_UNSPECIFIED
    assert not request.sampling.HasField("max_tokens")
    assert not request.sampling.HasField("temperature")


def test_keywords_go_over_the_sampling_object() -> None:
    """A keyword replaces that field of `sampling` and leaves the others."""
    request = build(sampling=Sampling(max_tokens=9, temperature=0.5), max_tokens=3)
    assert request.sampling.max_tokens == 3
    assert request.sampling.temperature == 0.5


def test_token_ids_and_messages_travel_as_they_are() -> None:
    """A token-id prompt and both forms of a message reach their fields in order."""
    assert list(build(prompt=(3, 1, 2)).token_ids.ids) == [3, 1, 2]
    chat = _call.build({}, messages=[Message("system", "be brief"), {"role": "user", "content": "hi"}]).request.chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"prompt": ""}, EmptyPrompt, "prompt"),
        ({"prompt": []}, EmptyPrompt, "prompt"),
        ({"prompt": [1, -1]}, InvalidRequest, "prompt"),
        ({"prompt": [2**32]}, InvalidRequest, "prompt"),
        ({"prompt": ["a"]}, InvalidRequest, "prompt"),
        ({"prompt": b"bytes"}, InvalidRequest, "prompt"),
        ({"prompt": None}, InvalidRequest, "prompt"),
        ({"prompt": "\ud800"}, InvalidRequest, "prompt"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 2**32}, InvalidRequest, "max_tokens"),
        ({"max_tokens": "8"}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 1.5}, InvalidRequest, "max_tokens"),
        ({"n": 0}, InvalidRequest, "n is 0"),
        ({"stop": [1]}, InvalidRequest, "stop"),
        ({"stop_token_ids": 3}, InvalidRequest, "stop_token_ids"),
        ({"seed": 2**63}, InvalidRequest, "seed"),
        ({"mode": "push"}, InvalidRequest, "mode"),
        ({"route": "any"}, InvalidRequest, "route"),
        ({"on_failure": "retry"}, InvalidRequest, "on_failure"),
        ({"timeout": 0}, InvalidRequest, "timeout"),
        ({"timeout": float("nan")}, InvalidRequest, "timeout"),
        ({"traceparent": "no"}, InvalidRequest, "traceparent"),
        ({"max_token": 3}, UnknownField, "max_token"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(fields: Mapping[str, Any], kind: type[PdserveError], says: str) -> None:
    """A value that the wire cannot carry is a typed error that names the argument, before anything is sent."""
    with pytest.raises(PdserveError, match=says) as caught:
        build(**fields)
    assert type(caught.value) is kind


def test_an_unusable_conversation_is_refused() -> None:
    """No message, and a message without exactly role and content, are refused."""
    with pytest.raises(EmptyPrompt):
        _call.build({}, messages=[])
    with pytest.raises(InvalidRequest, match="role and a content"):
        _call.build({}, messages=[{"role": "user", "content": "x", "name": "y"}])
    with pytest.raises(InvalidRequest, match="content"):
        _call.build({}, messages=[Message("user", 3)])  # type: ignore[arg-type]  # the claim


def event(**fields: Any) -> serving_pb2.GenerateResponse:
    return serving_pb2.GenerateResponse(**fields)


STARTED = serving_pb2.Started(request_id="r", trace_id="t", model="m", mode=common_pb2.TRANSFER_MODE_READ)


def test_a_stream_becomes_a_completion() -> None:
    """Interleaved deltas of two answers come together by index, with every fact of `finished`."""
    assembly = Assembly()
    assembly.feed(event(started=STARTED))
    candidate = common_pb2.TokenLogprob(token_id=5, token="b", logprob=-0.5)
    position = common_pb2.PositionLogprobs(sampled=candidate, top=[candidate])
    stop, length = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
    for delta in (
        serving_pb2.Delta(index=1, text="B", token_ids=[20]),
        serving_pb2.Delta(index=0, text="a", token_ids=[10]),
        serving_pb2.Delta(index=0, text="b", token_ids=[11], logprobs=[position], finish_reason=length),
        serving_pb2.Delta(index=1, text="", finish_reason=stop, stop_reason="END"),
    ):
        assert assembly.feed(event(delta=delta)) is not None
    facts = common_pb2.TransferFacts(
        kv_bytes=3_000_000_000,
        blocks=2,
        layers=3,
        ranks=1,
        copy_ns=1_500_000_000,
        transport="shm",
        first_post_ns=10,
        landed_ns=2_000_000_010,
        overlapped_bytes=7,
        lanes="tcp/eth0 (software emulation)",
    )
    timings = serving_pb2.Timings(ttft_seconds=0.5, unattributed_seconds=0.1, e2e_seconds=2.0)
    timings.parts.add(name="admit", seconds=0.1)
    timings.parts.add(name="kv.wait", seconds=0.3)
    assembly.feed(
        event(
            finished=serving_pb2.Finished(
                usage=serving_pb2.Usage(prompt_tokens=40, cached_tokens=32, completion_tokens=3),
                timings=timings,
                transfer=facts,
                mode=common_pb2.TRANSFER_MODE_READ,
                recomputed_tokens=1,
                fallbacks=0,
                continuations=2,
                prefill_engine_id="p",
                decode_engine_id="d",
            )
        )
    )
    done = assembly.end()
    assert [(c.index, c.text, c.token_ids) for c in done.choices] == [(0, "ab", (10, 11)), (1, "B", (20,))]
    assert [(c.finish_reason, c.stop_reason) for c in done.choices] == [("length", ""), ("stop", "END")]
    assert done.choices[0].logprobs[0].sampled.token == "b"
    assert (done.request_id, done.trace_id, done.model, done.mode) == ("r", "t", "m", "read")
    assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens) == (40, 32, 3)
    assert list(done.timings.parts.items()) == [("admit", 0.1), ("kv.wait", 0.3)]
    assert sum(done.timings.parts.values()) + done.timings.unattributed_seconds == pytest.approx(0.5)
    assert (done.kv_bytes, done.transport) == (3_000_000_000, "shm")
    assert done.transfer is not None
    assert done.transfer.gigabytes_per_second == pytest.approx(2.0)
    assert done.transfer.span_seconds == pytest.approx(2.0)
    assert done.transfer.overlapped_bytes == 7
    assert done.transfer.lanes == "tcp/eth0 (software emulation)"
    assert (done.recomputed_tokens, done.fallbacks, done.continuations) == (1, 0, 2)
    assert (done.prefill_engine_id, done.decode_engine_id) == ("p", "d")


def test_a_colocated_answer_has_no_transfer() -> None:
    """Without a hand-over there are no transfer facts, no mode and no bytes."""
    assembly = Assembly()
    assembly.feed(event(started=STARTED))
    assembly.feed(event(delta=serving_pb2.Delta(text="a", finish_reason=common_pb2.FINISH_REASON_STOP)))
    assembly.feed(event(finished=serving_pb2.Finished()))
    done = assembly.end()
    assert (done.transfer, done.mode, done.kv_bytes, done.transport) == (None, None, 0, "")


def test_a_broken_stream_is_an_error_not_an_answer() -> None:
    """Events out of order, an answer without an end, and a cut stream never pass for a completion."""
    with pytest.raises(PdserveError, match="out of order"):
        Assembly().feed(event(delta=serving_pb2.Delta(text="a")))
    assembly = Assembly()
    assembly.feed(event(started=STARTED))
    with pytest.raises(PdserveError, match="out of order"):
        assembly.feed(event(started=STARTED))
    assembly.feed(event(delta=serving_pb2.Delta(text="a")))
    with pytest.raises(PdserveError, match="before the answer was finished"):
        assembly.end()
    with pytest.raises(PdserveError, match="before answer 0 did"):
        assembly.feed(event(finished=serving_pb2.Finished()))


def test_an_event_of_a_newer_proxy_is_passed_over() -> None:
    """An event that this client does not know changes nothing."""
    assembly = Assembly()
    assert assembly.feed(serving_pb2.GenerateResponse()) is None
    assert assembly.started is None


def test_topology_and_models_keep_their_order_and_facts() -> None:
    """Each engine's state comes out as it was said; an unknown role is called that."""
    wire = serving_pb2.GetTopologyResponse(default_mode=common_pb2.TRANSFER_MODE_WRITE, queued=1, in_flight=2)
    wire.engines.add(engine_id="a", role=common_pb2.ENGINE_ROLE_PREFILL, state="ready", free_kv_tokens=5)
    wire.engines.add(engine_id="b", state="foreign", excluded_because="no engine_id")
    topology = _codec.topology(wire)
    assert [(e.engine_id, e.role, e.state) for e in topology.engines] == [
        ("a", "prefill", "ready"),
        ("b", "unknown", "foreign"),
    ]
    assert topology.engines[1].excluded_because == "no engine_id"
    assert (topology.default_mode, topology.queued, topology.in_flight) == ("write", 1, 2)


def test_errors_are_those_of_the_services() -> None:
    """The SDK's error classes are pdserve.rpc.errors' own, so `except` works for both."""
    from pdserve.rpc import errors

    assert ContextExceeded is errors.ContextExceeded
