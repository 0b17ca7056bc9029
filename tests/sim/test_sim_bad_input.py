"""Requests that cannot be meant: one reason over both faces of the proxy, no engine is asked, nothing is held."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.rpc import errors
from tests.sim.fleet import Fleet, Launch, Prompt

CONTEXT, PREFILL_POOL, DECODE_POOL = 256, 128, 192
GENERATE = "/pdserve.api.serving.v1.Inference/Generate"


@pytest.fixture
async def small(launch: Launch) -> Fleet:
    """Pools of unequal size, both smaller than the context."""
    fleet = await launch(prefills=0, decodes=0, max_model_len=CONTEXT)
    await fleet.host("prefill", num_blocks=PREFILL_POOL // 16)
    await fleet.host("decode", num_blocks=DECODE_POOL // 16)
    return fleet


def untouched(fleet: Fleet) -> None:
    """No engine ran a step, kvd heard of no transfer, and nothing is reserved."""
    assert [service.engine.load().steps for service in (*fleet.prefills, *fleet.decodes)] == [0, 0]
    assert fleet.ended() == {}
    assert fleet.held() == []


ROWS: list[tuple[str, dict[str, Any], str, int]] = [
    ("an unknown model", {"model": "gpt"}, "UNKNOWN_MODEL", 404),
    ("a prompt longer than the context", {"prompt": [7] * (CONTEXT + 1)}, "CONTEXT_LENGTH_EXCEEDED", 400),
    ("a prompt that fills the context", {"prompt": [7] * CONTEXT}, "CONTEXT_LENGTH_EXCEEDED", 400),
    ("a prompt longer than prefill's pool", {"prompt": [7] * (PREFILL_POOL + 1)}, "PROMPT_EXCEEDS_POOL", 400),
    ("an answer longer than decode's pool", {"prompt": [7] * 100, "max_tokens": 93}, "PROMPT_EXCEEDS_POOL", 400),
    ("zero max_tokens", {"max_tokens": 0}, "INVALID_REQUEST", 400),
    ("huge max_tokens", {"max_tokens": 4_000_000_000}, "CONTEXT_LENGTH_EXCEEDED", 400),
    ("negative max_tokens", {"max_tokens": -1}, "INVALID_REQUEST", 400),
    ("more than any integer", {"max_tokens": 2**70}, "INVALID_REQUEST", 400),
    ("an empty text", {"prompt": ""}, "EMPTY_PROMPT", 400),
    ("no token", {"prompt": []}, "EMPTY_PROMPT", 400),
    ("a token outside the vocabulary", {"prompt": [1, 258]}, "INVALID_REQUEST", 400),
    ("a negative token", {"prompt": [1, -1]}, "INVALID_REQUEST", 400),
    ("an unknown field", {"max_token": 4}, "UNKNOWN_FIELD", 400),
    ("no answer at all", {"n": 0}, "INVALID_REQUEST", 400),
]


@pytest.mark.parametrize(("fields", "reason", "status"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_both_faces_refuse_alike(small: Fleet, fields: dict[str, Any], reason: str, status: int) -> None:
    """The SDK's error has the reason that HTTP's body has; afterwards the next request is served."""
    asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0.0} | fields
    with pytest.raises(errors.BY_REASON[reason]) as raised:
        await small.client.generate(**asked)
    assert raised.value.reason == reason
    code, body = await small.post(asked)
    assert (code, body["error"]["code"]) == (status, reason)
    untouched(small)
    assert (await small.ask("hello", max_tokens=4)).token_ids == await small.alone(list(b"hello"), 4)


async def test_a_prompt_longer_than_decodes_pool(launch: Launch, prompt: Prompt) -> None:
    """Though prefill could compute it."""
    fleet = await launch(prefills=0, decodes=0)
    await fleet.host("prefill", num_blocks=12)
    await fleet.host("decode", num_blocks=8)
    with pytest.raises(errors.PoolExceeded) as raised:
        await fleet.ask(prompt(130), max_tokens=1)
    assert raised.value.metadata["side"] == "decode"
    code, body = await fleet.post({"prompt": [7] * 130, "max_tokens": 1})
    assert (code, body["error"]["code"]) == (400, "PROMPT_EXCEEDS_POOL")
    untouched(fleet)


@pytest.mark.parametrize("data", [b"", b"{", b'{"prompt": "x"', b"\xff\xfe\xff", b"null", b"[" * 50_000])
async def test_malformed_json(small: Fleet, data: bytes) -> None:
    """Not JSON, or no object: INVALID_REQUEST."""
    code, body = await small.post(data)
    assert (code, body["error"]["code"]) == (400, "INVALID_REQUEST")
    untouched(small)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x1a\xff\x01", b"\x1a\x02\xff\xff"])
async def test_malformed_proto(small: Fleet, data: bytes) -> None:
    """No message, cut off, or text that is no UTF-8: INVALID_REQUEST, as malformed JSON."""
    channel = await small.channel(small.proxy.addresses.grpc)
    error = await small.refusal(channel.unary_stream(GENERATE, bytes, bytes)(data, timeout=10))
    assert error.reason == "INVALID_REQUEST"
    untouched(small)


async def test_unknown_fields_of_both_wires(small: Fleet) -> None:
    """A field number, or a name at any depth, that this version does not have is refused, not dropped."""
    channel = await small.channel(small.proxy.addresses.grpc)
    data = b"\x1a\x01x\xba\x06\x01a"
    error = await small.refusal(channel.unary_stream(GENERATE, bytes, bytes)(data, timeout=10))
    assert error.reason == "UNKNOWN_FIELD"
    for body in ({"prompt": "x", "pdserve": {"modes": "read"}}, {"prompt": "x", "stream_options": {"x": 1}}):
        code, answer = await small.post(body)
        assert (code, answer["error"]["code"]) == (400, "UNKNOWN_FIELD"), json.dumps(body)
    untouched(small)


async def test_a_pair_that_cannot_exchange_kv(launch: Launch) -> None:
    """Two engines that differ in anything that matters are refused at pairing, before prefill, and the refusal
    names it, with how the KV of both lies. An engine that shares the identity is paired with, whatever else is
    there."""
    fleet = await launch(decodes=0)
    others = [
        {"weights": "sha256:other"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "fp8"},
        {"attention_layout": "NHD"},
        {"connector_protocol": "999"},
    ]
    shapes: list[dict[str, Any]] = [{"block_bytes": 256}, {"layers": 6}, {"ranks": 2}]
    for identity, shape in [(other, {}) for other in others] + [({}, shape) for shape in shapes]:
        decode = await fleet.host("decode", identity=identity, **shape)
        with pytest.raises(errors.IncompatibleEngines) as raised:
            await fleet.ask("hello")
        code, body = await fleet.post({"prompt": "hello", "max_tokens": 4})
        assert (code, body["error"]["code"]) == (409, "INCOMPATIBLE_ENGINES")
        named = {"ranks": "kv_heads", "block_bytes": "head_bytes"}
        for name in identity or {named.get(name, name) for name in shape}:
            assert name in raised.value.metadata
            assert name in body["error"]["message"]
        for service in (fleet.prefills[0], decode):
            assert service.engine.info.layout in raised.value.message
        assert decode.engine.load().steps == 0
        await fleet.leave(decode)
    assert fleet.prefills[0].engine.load().steps == 0
    twin = await fleet.host("decode")
    await fleet.host("decode", identity=others[0])
    assert (await fleet.ask("hello")).decode_engine_id == twin.engine_id


async def test_engines_of_two_models(launch: Launch) -> None:
    """Two names are two models, each with its own pair; one is not named where two are served."""
    fleet = await launch()
    for role in ("prefill", "decode"):
        await fleet.host(role, model="other")
    for model in ("sim", "other"):
        answer = await fleet.ask("hello", model=model)
        at = 0 if model == "sim" else 1
        assert answer.prefill_engine_id == fleet.prefills[at].engine_id
        assert answer.decode_engine_id == fleet.decodes[at].engine_id
    with pytest.raises(errors.InvalidRequest, match="name one of the models"):
        await fleet.ask("hello")


async def test_a_registration_under_another_key(fleet: Fleet, tmp_path: Path) -> None:
    """An engine that cannot prove that it belongs here is refused, says why, and ends; nobody routes to it."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(b"the key of quite another cluster")
    with pytest.raises(errors.Unauthenticated):
        await fleet.host("decode", key=key)
    assert len((await fleet.client.topology()).engines) == 2
