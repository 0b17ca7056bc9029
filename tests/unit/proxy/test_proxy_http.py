"""The OpenAI face as OpenAI's own client sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from pdserve.proxy.testing import FakeEngine, echo_decode
from pdserve.rpc.errors import EngineDied, Overloaded


@pytest.fixture
async def client(pair: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, without its retries."""
    deployment, _, _ = pair
    async with openai.AsyncOpenAI(
        base_url=f"http://{deployment.app.addresses.http}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


async def test_a_completion(client: openai.AsyncOpenAI, pair: Any) -> None:
    """Text, finish reason, usage with prefill's cached tokens, and ours beside them."""
    _, prefill, _ = pair
    prefill.cached_tokens = 3
    answer = await client.completions.create(model="fake", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    ours = (answer.model_extra or {})["pdserve"]
    assert (ours["mode"], ours["fallbacks"], ours["transfer"]["transport"]) == ("read", 0, "fake")
    assert (ours["prefill_engine_id"], ours["request_id"]) == (prefill.engine_id, answer.id.removeprefix("cmpl-"))
    parts = ours["timings"]
    assert sum(parts["parts"].values()) + parts["unattributed_seconds"] == pytest.approx(parts["ttft_seconds"])
    assert parts["unattributed_seconds"] == 0


async def test_a_chat(client: openai.AsyncOpenAI, pair: Any) -> None:
    """Messages are rendered once; both legs get the same ids."""
    _, prefill, decode = pair
    answer = await client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        ],
        max_completion_tokens=2,
    )
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].message.role == "assistant"
    prompt = bytes(prefill.prefills[0].prompt_token_ids).decode()
    assert prompt == "system: be brief\nuser: hello\nassistant: "
    assert list(decode.decodes[0].prompt_token_ids) == list(prefill.prefills[0].prompt_token_ids)


async def test_max_tokens_absent_is_openais_default(client: openai.AsyncOpenAI, pair: Any) -> None:
    """16 for completions, up to the context's end for chat; never zero."""
    _, _, decode = pair
    await client.completions.create(model="fake", prompt="x" * 100)
    assert decode.decodes[0].sampling.max_tokens == 16
    rendered = len("user: " + "x" * 485 + "\nassistant: ")
    await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 485}])
    assert decode.decodes[1].sampling.max_tokens == 512 - rendered


async def test_a_streamed_completion(client: openai.AsyncOpenAI) -> None:
    """A chunk a token; the last one carries the finish reason and ours; no usage unless asked for."""
    stream = await client.completions.create(model="fake", prompt="hello", max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert [bool((chunk.model_extra or {}).get("pdserve")) for chunk in chunks] == [False, False, True]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_streamed_chat_with_usage_and_several_answers(client: openai.AsyncOpenAI) -> None:
    """Each answer begins with its role and ends with its reason; usage comes last and without choices."""
    stream = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    last = chunks.pop()
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    assert (last.model_extra or {})["pdserve"]["mode"] == "read"
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.content for choice in mine] == ["a", "b"]
        assert [choice.delta.role for choice in mine] == ["assistant", None]
        assert [choice.finish_reason for choice in mine] == [None, "length"]


async def test_the_bytes_of_a_stream(pair: Any) -> None:
    """Server-sent events that end with [DONE], usage null until the last, the request id in a header."""
    deployment, _, _ = pair
    body = {"prompt": "x", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{deployment.app.addresses.http}/v1/completions", json=body, headers={"X-Request-Id": "mine"}
        ) as response,
    ):
        assert response.headers["X-Request-Id"] == "mine"
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    said = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["usage"] is None for chunk in said] == [True, True, False]
    assert said[0]["id"] == "cmpl-mine"


async def test_logprobs_in_both_styles(client: openai.AsyncOpenAI) -> None:
    """Completions: parallel lists with offsets. Chat: one entry a token with its bytes."""
    old = await client.completions.create(model="fake", prompt="x", max_tokens=2, logprobs=2)
    found = old.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "b"]
    assert found.token_logprobs == [-0.25, -0.25]
    assert found.text_offset == [0, 1]
    assert found.top_logprobs == [{"a": -0.25, "A": -1.0}, {"b": -0.25, "A": -1.0}]
    chat = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=1, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert (content.content[0].token, content.content[0].bytes) == ("a", [97])
    assert [top.token for top in content.content[0].top_logprobs] == ["a", "A"]


async def test_sampling_reaches_decode_unchanged(client: openai.AsyncOpenAI, pair: Any) -> None:
    """OpenAI's parameters and vLLM's; prefill gets only what shapes the first token."""
    _, prefill, decode = pair
    await client.completions.create(
        model="fake",
        prompt=[104, 105],
        max_tokens=2,
        temperature=0,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-3,
        stop=["x", "y"],
        n=2,
        extra_body={
            "top_k": 7,
            "min_tokens": 1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "repetition_penalty": 1.5,
            "pdserve": {"mode": "write", "route": "split", "on_failure": "fail"},
        },
    )
    got = decode.decodes[0]
    s = got.sampling
    assert list(got.prompt_token_ids) == [104, 105]
    assert (s.HasField("temperature"), s.temperature, s.top_p, s.top_k) == (True, 0, 0.5, 7)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty, s.seed) == (1, -1, 1.5, -3)
    assert (list(s.stop), list(s.stop_token_ids), s.min_tokens, s.ignore_eos, s.n) == (["x", "y"], [9], 1, True, 2)
    assert got.source.mode == 2
    first = prefill.prefills[0]
    assert (first.consumers, first.sampling.max_tokens, first.sampling.min_tokens, first.sampling.n) == (2, 1, 0, 1)
    assert (first.sampling.seed, list(first.sampling.stop), first.sampling.ignore_eos) == (-3, [], True)


async def test_an_error_before_the_first_token_has_its_status(client: openai.AsyncOpenAI, pair: Any) -> None:
    """Streamed or not: HTTP 429 with the typed reason, not a 200 that turns out badly."""
    _, prefill, _ = pair

    async def refuse(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        raise Overloaded("the engine's queue is full")
        yield

    prefill.on_prefill = refuse
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(
                model="fake", prompt="x", max_tokens=2, stream=stream, extra_body={"pdserve": {"on_failure": "fail"}}
            )
        assert caught.value.code == "OVERLOADED"
        assert caught.value.response.headers["x-request-id"]


async def test_an_error_in_the_middle_is_an_event(client: openai.AsyncOpenAI, pair: Any) -> None:
    """Tokens, then an error event, then the end: OpenAI's client raises it, and no [DONE] follows."""
    deployment, _, decode = pair

    async def half(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        count = 0
        async for message in echo_decode(engine, request):
            yield message
            count += 1
            if count == 2:
                raise EngineDied("out of memory")

    decode.on_decode = half
    stream = await client.completions.create(model="fake", prompt="x", max_tokens=5, stream=True)
    chunks = aiter(stream)
    assert [(await anext(chunks)).choices[0].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(openai.APIError, match="out of memory") as caught:
        await anext(chunks)
    assert caught.value.code == "ENGINE_DIED"
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{deployment.app.addresses.http}/v1/completions", json={"prompt": "x", "stream": True}
        ) as response,
    ):
        raw = await response.text()
    assert "[DONE]" not in raw
    assert raw.endswith("}}\n\n")
    with pytest.raises(openai.InternalServerError) as whole:
        await client.completions.create(model="fake", prompt="x", max_tokens=5)
    assert whole.value.code == "ENGINE_DIED"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_both_legs(pair: Any, stream: bool) -> None:
    """Decode is told at once and the credits are back; nobody computes for a closed socket."""
    deployment, prefill, decode = pair
    begun = asyncio.Event()

    async def endless(engine: FakeEngine, request: Any) -> AsyncIterator[Any]:
        async for message in echo_decode(engine, request):
            if message.WhichOneof("event") == "tokens":
                yield message
                break
        begun.set()
        await asyncio.Event().wait()

    decode.on_decode = endless
    url = f"http://{deployment.app.addresses.http}/v1/completions"
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(url, json={"prompt": "x", "max_tokens": 50, "stream": stream}))
        await begun.wait()
        assert deployment.held() > 0
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    await decode.idle.wait()
    await prefill.idle.wait()
    await deployment.app.drain()
    assert deployment.held() == 0


async def test_models_and_health(client: openai.AsyncOpenAI, pair: Any) -> None:
    """What can be asked for now."""
    deployment, _, _ = pair
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["fake"]
    assert (models[0].model_extra or {})["max_model_len"] == 512
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{deployment.app.addresses.http}/health") as response,
    ):
        assert response.status == 200
        assert (await response.json())["models"] == ["fake"]
