"""Any OpenAI endpoint over HTTP: a real server on loopback with scripted bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pdserve.bench.endpoint import Asking, Outcome, Trail, failure
from pdserve.bench.over_http import HttpEndpoint
from pdserve.bench.sse import Events, refusal
from pdserve.rpc.errors import ConfigError, NoEngines, Overloaded, PdserveError, Unavailable
from pdserve.runtime.listening import HttpPort

MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}


def event(**members: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(members) + b"\n\n"


def token(text: str = "x") -> bytes:
    """A chunk with one choice."""
    return event(choices=[{"index": 0, "text": text}])


USAGE = event(
    choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    pdserve={
        "mode": "write", "transfer": {"transport": "shm"}, "fallbacks": 1,
        "timings": {"parts": {"tokenize": 0.25}, "unattributed_seconds": 0.5},
    },
)  # fmt: skip
DONE = b"data: [DONE]\n\n"


class Server:
    """Answers as told; keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.parts: Sequence[bytes] = (token(), token(), USAGE, DONE)
        """Written one by one; the connection is cut at an empty one."""
        self.refuse: tuple[int, bytes] | None = None
        self.models: Any = MODELS

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.Response(body=msgspec.json.encode(self.models), content_type="application/json")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refuse:
            return web.Response(status=self.refuse[0], body=self.refuse[1])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part in self.parts:
            if not part and request.transport:
                request.transport.close()
                break
            await answer.write(part)
        return answer


Opened = Callable[..., Any]


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    """The server and its URL."""
    scripted, app = Server(), web.Application()
    app.router.add_get("/v1/models", scripted.list)
    app.router.add_post("/v1/completions", scripted.complete)
    port = HttpPort(app)
    yield scripted, f"http://127.0.0.1:{await port.start('127.0.0.1', 0)}"
    await port.aclose()


async def ask(url: str, asking: Asking | None = None, prompt: Any = (1, 2, 3)) -> tuple[Outcome, Trail]:
    """One request of five tokens."""
    trail = Trail()
    async with contextlib.aclosing(await HttpEndpoint.open(url, asking or Asking())) as endpoint:
        await endpoint.describe(5.0)
        return await endpoint.prepare(prompt, 5)(trail), trail


async def test_a_request_is_openais_and_its_answer_is_read_whole(server: tuple[Server, str]) -> None:
    """Token ids, a fixed length, usage; mode, transport and parts where a pdserve proxy tells them."""
    scripted, url = server
    outcome, trail = await ask(f"{url}/v1/", Asking(mode="write"))
    assert scripted.bodies == [
        {
            "model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "ignore_eos": True, "temperature": 0.0,
            "stream_options": {"include_usage": True}, "pdserve": {"mode": "write"},
        }
    ]  # fmt: skip
    assert outcome == Outcome(5, 7, 4, "write", "shm", {"tokenize": 0.25}, 0.5, 1)
    assert len(trail.chunks) == 2
    assert trail.sent is not None
    assert trail.sent <= trail.chunks[0] <= trail.chunks[1]


async def test_an_endpoint_that_says_little_is_measured_too(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No usage, no ignore_eos, the key sent along: chunks are counted."""
    scripted, url = server
    scripted.parts = (b": ping\n\n", token(), token(), token(), DONE)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    outcome, trail = await ask(url, Asking(ignore_eos=False, temperature=None), "Hello")
    assert outcome == Outcome(3)
    assert len(trail.chunks) == 3
    assert set(scripted.bodies[0]) == {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert scripted.headers[0]["Authorization"] == "Bearer secret"


async def test_the_only_model_is_found_and_a_wrong_name_refused(server: tuple[Server, str]) -> None:
    """With its longest context."""
    _, url = server
    async with contextlib.aclosing(await HttpEndpoint.open(url, Asking())) as endpoint:
        described = await endpoint.describe(5.0)
    assert (described.model, described.max_model_len) == ("m", 4096)
    with pytest.raises(PdserveError, match="serves m, not other"):
        await ask(url, Asking(model="other"))


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"data": []}, "serves no model"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "name one with --model"),
        ({"models": []}, "does not answer as OpenAI's API does"),
        ([1], "does not answer as OpenAI's API does"),
    ],
)
async def test_an_endpoint_without_one_model_is_refused(server: tuple[Server, str], models: Any, words: str) -> None:
    """Before anything is measured."""
    scripted, url = server
    scripted.models = models
    with pytest.raises(PdserveError, match=words):
        await ask(url)


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (503, b'{"error": {"message": "none", "code": "NO_ENGINES"}}', NoEngines, "NO_ENGINES"),
        (400, b'{"error": {"message": "too long", "code": 400}}', PdserveError, "HTTP_400"),
        (429, b'{"error": {"message": "slow down", "code": "rate_limit"}}', Overloaded, "RATE_LIMIT"),
        (502, b"<html>bad gateway</html>", Unavailable, "HTTP_502"),
        (404, b'{"detail": "Not Found"}', PdserveError, "HTTP_404"),
    ],
)
async def test_a_refusal_keeps_its_reason(
    server: tuple[Server, str], status: int, body: bytes, kind: type[PdserveError], reason: str
) -> None:
    """Of pdserve, of vLLM, of a gateway between."""
    scripted, url = server
    scripted.refuse = (status, body)
    with pytest.raises(kind) as caught:
        await ask(url)
    assert failure(caught.value).reason == reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((token(),), "STREAM_ENDED"),
        ((token(), event(error={"message": "gone", "code": "ENGINE_DIED"})), "ENGINE_DIED"),
        ((token(), event(error="gone")), "STREAM_ERROR"),
        ((token(), b"data: {]\n\n"), "BAD_ANSWER"),
        ((token(), b""), "UNAVAILABLE"),
    ],
)
async def test_a_stream_that_breaks_is_a_failure(
    server: tuple[Server, str], parts: Sequence[bytes], reason: str
) -> None:
    """Without its end, with an error for an end, with nonsense, with a cut connection: what came is in the trail."""
    scripted, url = server
    scripted.parts = parts
    trail = Trail()
    async with contextlib.aclosing(await HttpEndpoint.open(url, Asking())) as endpoint:
        with pytest.raises(PdserveError) as caught:
            await endpoint.prepare([1], 5)(trail)
    assert failure(caught.value).reason == reason
    assert len(trail.chunks) == 1


async def test_nobody_there_is_unavailable_and_no_url_is_a_wrong_setting() -> None:
    """A port that nobody listens at; an address without http."""
    probe = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()
    with pytest.raises(Unavailable, match=str(port)):
        await ask(f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="no URL"):
        await HttpEndpoint.open("127.0.0.1:8000", Asking())


def test_events_are_cut_wherever_the_bytes_are() -> None:
    """Byte by byte and in one piece: the same chunks, [DONE] seen."""
    data = token("a") + b": comment\n\nevent: x\r\n" + USAGE.replace(b"\n", b"\r\n") + DONE
    whole, bit_by_bit = Events(), Events()
    pieces = [chunk for byte in data for chunk in bit_by_bit.feed(bytes([byte]))]
    assert pieces == list(whole.feed(data))
    assert len(pieces) == 2
    assert whole.done
    assert bit_by_bit.done


def test_a_refusal_without_words_says_so() -> None:
    """Rather than nothing."""
    assert refusal(500, {}).message == "no more was said"
