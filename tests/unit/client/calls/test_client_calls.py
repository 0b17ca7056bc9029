"""What both clients ask and get: answers, streams, errors, deadlines. A fake proxy over real gRPC."""

import asyncio
from typing import Any

import pytest

from pdserve.client import (
    AsyncClient,
    Client,
    ContextExceeded,
    DeadlinePassed,
    InvalidRequest,
    NoEngines,
    Unavailable,
)
from pdserve.client.testing import FakeProxy
from tests.unit.client.calls.waits import SEEN_S, WAIT, Waits


def test_generate_and_chat(proxy: FakeProxy, client: Client) -> None:
    """The whole answer comes back, and the prompt went out in its field."""
    proxy.answer("Hello", " world")
    done = client.generate("Hi", max_tokens=2)
    assert (done.text, done.token_ids, done.choices[0].finish_reason) == ("Hello world", (0, 1), "length")
    assert client.chat([{"role": "user", "content": "Hi"}]).text == "ok"
    assert proxy.requests[0].text == "Hi"
    assert proxy.requests[1].chat.messages[0].content == "Hi"


async def test_generate_and_chat_async(proxy: FakeProxy, aclient: AsyncClient) -> None:
    """The same with asyncio."""
    proxy.answer("Hello", " world")
    done = await aclient.generate([1, 2], max_tokens=2)
    assert (done.text, done.token_ids) == ("Hello world", (0, 1))
    assert (await aclient.chat([{"role": "user", "content": "Hi"}])).text == "ok"
    assert list(proxy.requests[0].token_ids.ids) == [1, 2]


def test_stream_gives_deltas_then_the_whole(proxy: FakeProxy, client: Client) -> None:
    """Deltas come in order; the completion is there afterwards, and is whole though part was read already."""
    proxy.answer("a", "b", "c")
    with client.stream("x") as stream:
        assert stream.request_id == ""
        assert next(stream).text == "a"
        assert stream.request_id == "fake-1"
        assert stream.completion().text == "abc"
        assert list(stream) == []
    proxy.answer("a", "b")
    assert [d.text for d in client.stream_chat([{"role": "user", "content": "x"}])] == ["a", "b"]


async def test_stream_gives_deltas_then_the_whole_async(proxy: FakeProxy, aclient: AsyncClient) -> None:
    """The same with asyncio."""
    proxy.answer("a", "b", "c")
    async with aclient.stream("x") as stream:
        assert (await anext(stream)).text == "a"
        assert stream.trace_id
        assert (await stream.completion()).text == "abc"
        assert [d async for d in stream] == []
    proxy.answer("a", "b")
    assert [d.text async for d in aclient.stream_chat([{"role": "user", "content": "x"}])] == ["a", "b"]


def test_errors_keep_their_class(proxy: FakeProxy, client: Client) -> None:
    """What the proxy raises comes out as the same class with its metadata, before and after tokens."""
    proxy.refuse(ContextExceeded("too long", limit="512"))
    with pytest.raises(ContextExceeded, match="too long") as caught:
        client.generate("x")
    assert caught.value.metadata == {"limit": "512"}
    proxy.answer("a", error=NoEngines("gone"))
    with client.stream("x") as stream:
        assert next(stream).text == "a"
        with pytest.raises(NoEngines):
            next(stream)
    assert len(proxy.requests) == 2, "tokens were out, so nothing may be sent again"


async def test_errors_keep_their_class_async(proxy: FakeProxy, aclient: AsyncClient) -> None:
    """The same with asyncio."""
    proxy.refuse(ContextExceeded("too long", limit="512"))
    with pytest.raises(ContextExceeded, match="too long"):
        await aclient.generate("x")
    proxy.answer("a", error=NoEngines("gone"))
    async with aclient.stream("x") as stream:
        assert (await anext(stream)).text == "a"
        with pytest.raises(NoEngines):
            await anext(stream)
    assert len(proxy.requests) == 2


def test_a_deadline_ends_the_call_at_both_ends(proxy: FakeProxy, client: Client) -> None:
    """A call that takes longer than its timeout is DeadlinePassed here and over at the server."""
    client.list_models()  # connects: of the time that is left the server must see some
    script = proxy.answer("a", hang=True)
    with pytest.raises(DeadlinePassed):
        client.generate("x", timeout=SEEN_S)
    assert script.ended.wait(WAIT)


async def test_a_deadline_ends_the_call_at_both_ends_async(proxy: FakeProxy, aclient: AsyncClient) -> None:
    """The same with asyncio."""
    await aclient.list_models()
    script = proxy.answer("a", hang=True)
    with pytest.raises(DeadlinePassed):
        await aclient.generate("x", timeout=SEEN_S)
    assert await asyncio.to_thread(script.ended.wait, WAIT)


def test_models_and_topology(proxy: FakeProxy, client: Client, waits: Waits) -> None:
    """The unary calls answer in the SDK's words, and are retried."""
    proxy.topology.engines.add(engine_id="e", state="ready")
    proxy.unary_errors.append(Unavailable("starting"))
    assert [(m.id, m.max_model_len) for m in client.list_models()] == [("fake", 4096)]
    assert len(waits.seconds) == 1
    assert client.topology().engines[0].engine_id == "e"


async def test_models_and_topology_async(proxy: FakeProxy, aclient: AsyncClient, waits: Waits) -> None:
    """The same with asyncio."""
    proxy.topology.engines.add(engine_id="e", state="ready")
    proxy.unary_errors.append(Unavailable("starting"))
    assert [m.id for m in await aclient.list_models()] == ["fake"]
    assert len(waits.seconds) == 1
    assert (await aclient.topology()).engines[0].engine_id == "e"


def test_traceparent_travels(proxy: FakeProxy, client: Client) -> None:
    """The caller's trace context reaches the proxy as metadata."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.generate("x", traceparent=parent)
    assert proxy.metadata[0]["traceparent"] == parent


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_client_with_an_impossible_timeout_is_refused(timeout: Any) -> None:
    """The default timeout is checked when the client is made."""
    with pytest.raises(InvalidRequest, match="timeout"):
        Client("127.0.0.1:1", timeout=timeout)
    with pytest.raises(InvalidRequest, match="timeout"):
        AsyncClient("127.0.0.1:1", timeout=timeout)
