"""The same mistake gets the same reason over gRPC and over HTTP, and nothing is held afterwards."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.http.unsupported import IGNORED, UNSUPPORTED
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error

CONTEXT = 512  # of the fake engines


@dataclass
class Faces:
    """Both faces of one proxy."""

    deployment: Any
    prefill: Any
    stub: Any
    session: aiohttp.ClientSession
    url: str = ""

    async def over_grpc(self, request: serving_pb2.GenerateRequest) -> tuple[str, str]:
        """Reason and parameter of the refusal; ("", "") where there was none."""
        try:
            async for _ in self.stub.Generate(request):
                pass
        except grpc.aio.AioRpcError as error:
            typed = to_error(error)
            return typed.reason, typed.metadata.get("param", "")
        return "", ""

    async def over_http(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[str, str]:
        """Reason and parameter of the refusal; ("", "") where there was none."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            answer = await response.json()
            if response.status == 200:
                return "", ""
            error = answer["error"]
            assert error["message"]
            return error["code"], error["param"] or ""

    def untouched(self) -> None:
        """No engine was asked and no credit is held."""
        assert self.prefill.prefills == []
        assert self.deployment.held() == 0


@pytest.fixture
async def faces(pair: Any) -> AsyncIterator[Faces]:
    """A proxy with a pair of engines, and a client for each face."""
    deployment, prefill, _ = pair
    where = deployment.app.addresses
    async with aio_channel(where.grpc) as channel, aiohttp.ClientSession() as session:
        stub = serving_pb2_grpc.InferenceStub(channel)
        yield Faces(deployment, prefill, stub, session, f"http://{where.http}")


@dataclass(frozen=True)
class Case:
    """One mistake as each face can make it."""

    name: str
    reason: str
    param: str
    http: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)


def both(name: str, value: Any, reason: str = "INVALID_REQUEST", param: str = "") -> Case:
    """A sampling parameter that both faces call by the same name."""
    return Case(f"{name}={value!r}", reason, param or name, {name: value}, {name: value})


CASES = [
    Case("no model of that name", "UNKNOWN_MODEL", "model", {"model": "gpt"}, {}, {"model": "gpt"}),
    Case("empty prompt", "EMPTY_PROMPT", "prompt", {"prompt": ""}, {}, {"text": ""}),
    Case("no token", "EMPTY_PROMPT", "prompt", {"prompt": []}, {}, {"token_ids": {}}),
    Case("token outside", "INVALID_REQUEST", "prompt", {"prompt": [1, 258]}, {}, {"token_ids": {"ids": [1, 258]}}),
    Case("long prompt", "CONTEXT_LENGTH_EXCEEDED", "prompt", {"prompt": "x" * 512}, {}, {"text": "x" * 512}),
    both("max_tokens", 0),
    both("max_tokens", CONTEXT, "CONTEXT_LENGTH_EXCEEDED"),
    both("max_tokens", 4_000_000_000, "CONTEXT_LENGTH_EXCEEDED"),
    both("min_tokens", 5),
    both("temperature", -0.5),
    both("temperature", 2.5),
    both("top_p", 0.0),
    both("top_p", 1.5),
    both("presence_penalty", 2.5),
    both("frequency_penalty", -2.5),
    both("repetition_penalty", 0.0),
    both("n", 0),
    both("n", 17),
    both("logprobs", 21),
    both("stop", [""]),
    both("stop", ["x"] * 17),
    both("stop_token_ids", list(range(17))),
    Case("long id", "INVALID_REQUEST", "request_id", {}, {}, {"request_id": "x" * 129}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_both_faces_refuse_alike(faces: Faces, case: Case) -> None:
    """Reason and parameter are equal, and no engine hears of it."""
    request = serving_pb2.GenerateRequest(**({"text": "hello"} | case.request))
    request.sampling.max_tokens = 4
    for name, value in case.sampling.items():
        if isinstance(value, list):
            getattr(request.sampling, name).extend(value)
        else:
            setattr(request.sampling, name, value)
    headers = {"X-Request-Id": case.request["request_id"]} if "request_id" in case.request else {}
    body = {"prompt": "hello", "max_tokens": 4} | case.http
    assert await faces.over_grpc(request) == (case.reason, case.param)
    assert await faces.over_http(body, **headers) == (case.reason, case.param)
    faces.untouched()


async def test_grpc_refuses_what_it_does_not_know(faces: Faces) -> None:
    """Unknown fields at any depth, unknown enum values, no prompt at all, NaN."""
    unknown = b"\xba\x06\x01a"  # field 103, one byte
    top = serving_pb2.GenerateRequest.FromString(serving_pb2.GenerateRequest(text="x").SerializeToString() + unknown)
    assert await faces.over_grpc(top) == ("UNKNOWN_FIELD", "GenerateRequest.103")
    nested = serving_pb2.GenerateRequest()
    nested.chat.messages.add(role="user", content="x").MergeFromString(unknown)
    assert await faces.over_grpc(nested) == ("UNKNOWN_FIELD", "chat.messages.103")
    sampling = serving_pb2.GenerateRequest(text="x")
    sampling.sampling.MergeFromString(unknown)
    assert await faces.over_grpc(sampling) == ("UNKNOWN_FIELD", "sampling.103")
    for name in ("mode", "route", "on_failure"):
        odd = serving_pb2.GenerateRequest(text="x")
        setattr(odd, name, 77)
        assert await faces.over_grpc(odd) == ("INVALID_REQUEST", name)
    assert await faces.over_grpc(serving_pb2.GenerateRequest()) == ("EMPTY_PROMPT", "prompt")
    assert await faces.over_grpc(serving_pb2.GenerateRequest(chat=serving_pb2.ChatPrompt())) == (
        "EMPTY_PROMPT",
        "messages",
    )
    nan = serving_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(temperature=float("nan")))
    assert await faces.over_grpc(nan) == ("INVALID_REQUEST", "temperature")
    endless = common_pb2.SamplingParams(repetition_penalty=float("inf"))
    request = serving_pb2.GenerateRequest(text="x", sampling=endless)
    assert await faces.over_grpc(request) == ("INVALID_REQUEST", "repetition_penalty")
    faces.untouched()


HTTP_CASES: list[tuple[str, Any, str, str]] = [
    ("/v1/completions", b"{", "INVALID_REQUEST", ""),
    ("/v1/completions", b"[]", "INVALID_REQUEST", ""),
    ("/v1/completions", b"\xff\xfe", "INVALID_REQUEST", ""),
    ("/v1/completions", b"[" * 100_000, "INVALID_REQUEST", ""),
    ("/v1/completions", {}, "EMPTY_PROMPT", "prompt"),
    ("/v1/completions", {"prompt": 7}, "INVALID_REQUEST", "prompt"),
    ("/v1/completions", {"prompt": "x", "max_tokens": "4"}, "INVALID_REQUEST", "max_tokens"),
    ("/v1/completions", {"prompt": "x", "seed": 2**63}, "INVALID_REQUEST", "seed"),
    ("/v1/completions", {"prompt": "x", "top_k": -2}, "INVALID_REQUEST", "top_k"),
    ("/v1/completions", {"prompt": [-1]}, "INVALID_REQUEST", "prompt"),
    ("/v1/completions", {"prompt": "x", "maxtokens": 4}, "UNKNOWN_FIELD", "maxtokens"),
    ("/v1/completions", {"prompt": "x", "best_of": 2}, "UNSUPPORTED_PARAMETER", "best_of"),
    ("/v1/completions", {"prompt": "x", "echo": True}, "UNSUPPORTED_PARAMETER", "echo"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "UNSUPPORTED_PARAMETER", "suffix"),
    ("/v1/completions", {"prompt": ["x", "y"]}, "UNSUPPORTED_PARAMETER", "prompt"),
    ("/v1/completions", {"prompt": [[1], [2]]}, "UNSUPPORTED_PARAMETER", "prompt"),
    (
        "/v1/completions",
        {"prompt": "x", "stream_options": {"include_usage": True}},
        "INVALID_REQUEST",
        "stream_options",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "stream": True, "stream_options": {"x": 1}},
        "UNKNOWN_FIELD",
        "stream_options.x",
    ),
    ("/v1/completions", {"prompt": "x", "pdserve": {"mode": "push"}}, "INVALID_REQUEST", "pdserve.mode"),
    ("/v1/completions", {"prompt": "x", "pdserve": {"modes": "read"}}, "UNKNOWN_FIELD", "pdserve.modes"),
    ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"a": 1}}, "UNSUPPORTED_PARAMETER", "kv_transfer_params"),
    ("/v1/chat/completions", {}, "EMPTY_PROMPT", "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "INVALID_REQUEST", "messages[0]"),
    ("/v1/chat/completions", {"messages": [{"role": "", "content": "x"}]}, "INVALID_REQUEST", "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "INVALID_REQUEST", "messages[0].content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x", "name": "Ann"}]},
        "UNSUPPORTED_PARAMETER",
        "messages[0].name",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "UNSUPPORTED_PARAMETER",
        "messages[0].content[0].type",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "INVALID_REQUEST",
        "messages[0].content[0].text",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        "INVALID_REQUEST",
        "top_logprobs",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "max_completion_tokens": 5},
        "INVALID_REQUEST",
        "max_completion_tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        "UNSUPPORTED_PARAMETER",
        "tools",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        "UNSUPPORTED_PARAMETER",
        "response_format",
    ),
]


@pytest.mark.parametrize(("path", "body", "reason", "param"), HTTP_CASES)
async def test_http_refuses_by_name(faces: Faces, path: str, body: Any, reason: str, param: str) -> None:
    """Unknown and unsupported parameters are told apart, and named, at any depth."""
    assert await faces.over_http(body, path) == (reason, param)
    faces.untouched()


async def test_http_answers_in_one_form(faces: Faces) -> None:
    """A wrong path, a wrong method, a body that is too large: OpenAI's error object with the status."""
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405)):
        async with faces.session.request(method, faces.url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == "INVALID_REQUEST"


async def test_a_body_that_is_too_large_is_refused(deploy: Any) -> None:
    """HTTP 413 in the same form; what a server accepts is bounded."""
    deployment = await deploy(max_body=1000)
    url = f"http://{deployment.app.addresses.http}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, data=b"x" * 2000) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "INVALID_REQUEST"


async def test_every_unsupported_name_has_values_that_ask_for_nothing(faces: Faces) -> None:
    """A client that always sends its defaults is served; so is one that says who asks."""
    body = {"prompt": "x", "max_tokens": 1} | {name: neutral[-1] for name, neutral in UNSUPPORTED.items()}
    assert await faces.over_http(body | dict.fromkeys(IGNORED, "me")) == ("", "")


async def test_pools_are_checked_on_both_sides(deploy: Any) -> None:
    """PROMPT_EXCEEDS_POOL names the side, though the context would have room."""
    deployment = await deploy()
    prefill = await deployment.engine("prefill", pool=64)
    await deployment.engine("decode", pool=128)
    async with aio_channel(deployment.app.addresses.grpc) as channel, aiohttp.ClientSession() as session:
        faces = Faces(deployment, prefill, serving_pb2_grpc.InferenceStub(channel), session)
        for prompt, most, side in ((65, 1, "prefill"), (60, 69, "decode")):
            request = serving_pb2.GenerateRequest(
                text="x" * prompt, sampling=common_pb2.SamplingParams(max_tokens=most)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in faces.stub.Generate(request):
                    pass
            error = to_error(caught.value)
            assert (error.reason, error.metadata["side"]) == ("PROMPT_EXCEEDS_POOL", side)
        faces.untouched()
        assert await faces.over_grpc(serving_pb2.GenerateRequest(text="x" * 60)) == ("", "")
        assert prefill.prefills[0].sampling.max_tokens == 1


async def test_without_engines_the_reason_says_so(deploy: Any) -> None:
    """NO_ENGINES over both faces, with HTTP 503, and /health agrees."""
    deployment = await deploy()
    url = f"http://{deployment.app.addresses.http}"
    async with aio_channel(deployment.app.addresses.grpc) as channel, aiohttp.ClientSession() as session:
        faces = Faces(deployment, None, serving_pb2_grpc.InferenceStub(channel), session, url)
        assert (await faces.over_grpc(serving_pb2.GenerateRequest(text="x")))[0] == "NO_ENGINES"
        assert (await faces.over_http({"prompt": "x"}))[0] == "NO_ENGINES"
        async with session.get(url + "/health") as response:
            assert response.status == 503
