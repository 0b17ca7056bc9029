"""Both clients against a fake proxy over real gRPC."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import (
    AsyncClient,
    Client,
    ContextExceeded,
    DeadlinePassed,
    InvalidRequest,
    NoEngines,
    PdserveError,
    RequestCancelled,
    Retry,
    Unavailable,
)
from pdserve.client.testing import FakeProxy

WAIT = 10.0
SEEN_S = 1.0
"""Of a call whose deadline is to pass at the server: by then a busy machine has brought it there."""


class Waits:
    """Instead of sleeping, notes for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy() as fake:
        yield fake


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile: it is bound, and does not listen."""
    with socket.socket() as hold:
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold.bind(("127.0.0.1", 0))
        yield int(hold.getsockname()[1])


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def client(proxy: FakeProxy, waits: Waits) -> Iterator[Client]:
    retry = Retry(attempts=3)
    with Client(proxy.target, timeout=WAIT, retry=retry, random=lambda: 0.0, sleep=waits.sleep) as made:
        yield made


@pytest.fixture
async def aclient(proxy: FakeProxy, waits: Waits) -> AsyncIterator[AsyncClient]:
    retry = Retry(attempts=3)
    async with AsyncClient(
        proxy.target, timeout=WAIT, retry=retry, random=lambda: 0.0, sleep=waits.sleep_async
    ) as made:
        yield made


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


def test_leaving_a_stream_cancels_it(proxy: FakeProxy, client: Client) -> None:
    """The context manager's exit ends the call at the server; the stream says so when read on."""
    script = proxy.answer("a", hang=True)
    with client.stream("x") as stream:
        assert next(stream).text == "a"
    assert script.ended.wait(WAIT)
    with pytest.raises(RequestCancelled):
        next(stream)


async def test_leaving_a_stream_cancels_it_async(proxy: FakeProxy, aclient: AsyncClient) -> None:
    """The same with asyncio."""
    script = proxy.answer("a", hang=True)
    async with aclient.stream("x") as stream:
        assert (await anext(stream)).text == "a"
    assert await asyncio.to_thread(script.ended.wait, WAIT)
    with pytest.raises(RequestCancelled):
        await anext(stream)


def test_closing_from_another_thread_ends_a_blocked_read(proxy: FakeProxy, client: Client) -> None:
    """`close` reaches a read that waits: it raises RequestCancelled instead of waiting on."""
    proxy.answer("a", hang=True)
    stream = client.stream("x")
    next(stream)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            next(stream)
        except PdserveError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    stream.close()
    reader.join(WAIT)
    assert not reader.is_alive()
    assert [type(error) for error in caught] == [RequestCancelled]


async def test_closing_under_a_reading_task_is_an_error_not_a_cancellation(
    proxy: FakeProxy, aclient: AsyncClient
) -> None:
    """A task whose stream is closed under it gets RequestCancelled; one that is cancelled itself stays cancelled."""
    proxy.answer("a", hang=True)
    stream = aclient.stream("x")
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # let it begin to read
    await stream.aclose()
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(reader, WAIT)

    script = proxy.answer("a", hang=True)
    stream = aclient.stream("x")
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(script.ended.wait, WAIT)


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


def test_unavailable_before_the_first_token_is_sent_again(proxy: FakeProxy, client: Client, waits: Waits) -> None:
    """Refused, then taken but failed before a token, then answered: one call for the caller, one answer."""
    proxy.refuse(NoEngines("not yet"))
    proxy.answer(error=Unavailable("died"))
    proxy.answer("a")
    assert client.generate("x").text == "a"
    assert len(proxy.requests) == 3
    assert waits.seconds == [0.1, 0.2]


async def test_unavailable_before_the_first_token_is_sent_again_async(
    proxy: FakeProxy, aclient: AsyncClient, waits: Waits
) -> None:
    """The same with asyncio."""
    proxy.refuse(NoEngines("not yet"))
    proxy.answer(error=Unavailable("died"))
    proxy.answer("a")
    assert (await aclient.generate("x")).text == "a"
    assert len(proxy.requests) == 3
    assert waits.seconds == [0.1, 0.2]


class Ending(FakeProxy):
    """Ends one call of each kind as gRPC does in the name of a server that has just ended: CANCELLED, and no word."""

    def __init__(self, *first: str) -> None:
        super().__init__()
        self._first = self.answer_of(first)
        self._ends = {"Generate", "ListModels"}

    @staticmethod
    def answer_of(texts: tuple[str, ...]) -> list[serving_pb2.GenerateResponse]:
        """These deltas."""
        return [serving_pb2.GenerateResponse(delta=serving_pb2.Delta(text=text, token_ids=[7])) for text in texts]

    def Generate(self, request: serving_pb2.GenerateRequest, context: Any) -> Iterator[serving_pb2.GenerateResponse]:
        """See the class."""
        if "Generate" in self._ends:
            self._ends.remove("Generate")
            yield serving_pb2.GenerateResponse(started=serving_pb2.Started(request_id="r"))
            yield from self._first
            context.abort(grpc.StatusCode.CANCELLED, "")
        yield from super().Generate(request, context)

    def ListModels(self, request: serving_pb2.ListModelsRequest, context: Any) -> serving_pb2.ListModelsResponse:
        """See the class."""
        if "ListModels" in self._ends:
            self._ends.remove("ListModels")
            context.abort(grpc.StatusCode.CANCELLED, "")
        return super().ListModels(request, context)


async def test_a_call_that_meets_the_end_of_a_proxy_is_sent_again(waits: Waits) -> None:
    """Nobody here has cancelled it: it is as if nobody had been there, for calls of both kinds of both clients."""
    with Ending() as proxy, Client(proxy.target, timeout=WAIT, sleep=waits.sleep) as client:
        assert client.generate("x").text == "ok"
        assert client.list_models()
    with Ending() as proxy:
        async with AsyncClient(proxy.target, timeout=WAIT, sleep=waits.sleep_async) as aclient:
            assert (await aclient.generate("x")).text == "ok"
            assert await aclient.list_models()
    assert len(waits.seconds) == 4


async def test_an_answer_that_meets_the_end_of_a_proxy_says_so(waits: Waits) -> None:
    """With a token out it is not sent again, and it was not cancelled either: Unavailable."""
    with (
        Ending("a") as proxy,
        Client(proxy.target, timeout=WAIT, sleep=waits.sleep) as client,
        client.stream("x") as stream,
        pytest.raises(Unavailable, match="under the call"),
    ):
        stream.completion()
    with Ending("a") as proxy:
        async with AsyncClient(proxy.target, timeout=WAIT, sleep=waits.sleep_async) as aclient:
            with pytest.raises(Unavailable, match="under the call"):
                await aclient.stream("x").completion()
    assert not waits.seconds


def test_closing_the_client_ends_a_blocked_read(proxy: FakeProxy) -> None:
    """That is ours: RequestCancelled, and nothing is sent again."""
    proxy.answer("a", hang=True)
    client = Client(proxy.target, timeout=WAIT)
    stream = client.stream("x")
    next(stream)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            next(stream)
        except PdserveError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    client.close()
    reader.join(WAIT)
    assert not reader.is_alive()
    assert [type(error) for error in caught] == [RequestCancelled]


def test_sending_again_is_bounded(proxy: FakeProxy, client: Client) -> None:
    """After the last attempt the error reaches the caller."""
    for _ in range(3):
        proxy.refuse(NoEngines("not yet"))
    with pytest.raises(NoEngines):
        client.generate("x")
    assert len(proxy.requests) == 3


async def test_who_wants_to_know_is_told_why_it_is_sent_again(proxy: FakeProxy, waits: Waits) -> None:
    """By both clients, for calls of both kinds, with the error and the wait."""
    told: list[tuple[str, float]] = []

    def tell(error: PdserveError, seconds: float) -> None:
        told.append((error.message, seconds))

    proxy.refuse(NoEngines("one"))
    proxy.unary_errors.append(Unavailable("two"))
    with Client(proxy.target, timeout=WAIT, on_retry=tell, random=lambda: 0.0, sleep=waits.sleep) as client:
        assert client.generate("x").text == "ok"
        client.list_models()
    proxy.refuse(NoEngines("three"))
    proxy.unary_errors.append(Unavailable("four"))
    async with AsyncClient(
        proxy.target, timeout=WAIT, on_retry=tell, random=lambda: 0.0, sleep=waits.sleep_async
    ) as aclient:
        assert (await aclient.generate("x")).text == "ok"
        await aclient.list_models()
    assert told == [("one", 0.1), ("two", 0.1), ("three", 0.1), ("four", 0.1)]
    assert waits.seconds == [0.1] * 4


async def test_a_proxy_that_was_away_is_found_soon_after_it_is_back(unused_port: int) -> None:
    """Both clients keep dialling: gRPC's own pauses do not grow with the time that a proxy was away. Real time, since
    gRPC's pauses are: the address is empty for 10 s, after which they would have grown to 7 s, and the answer is there
    less than 4 s after a proxy is: a pause of a second, and what a busy machine takes."""
    target = f"127.0.0.1:{unused_port}"
    retry = Retry(first_delay_seconds=0.1, longest_delay_seconds=0.1)
    with Client(target, timeout=30.0, retry=retry) as client:
        async with AsyncClient(target, timeout=30.0, retry=retry) as aclient:
            asked = [
                asyncio.ensure_future(asyncio.to_thread(client.generate, "x")),
                asyncio.ensure_future(aclient.generate("x")),
            ]
            await asyncio.sleep(10.0)
            assert not any(task.done() for task in asked)
            with FakeProxy(unused_port):
                answers = await asyncio.wait_for(asyncio.gather(*asked), 4.0)
    assert [done.text for done in answers] == ["ok", "ok"]


def test_nobody_there(waits: Waits) -> None:
    """A proxy that does not listen is Unavailable, after the retries."""
    with (
        Client("127.0.0.1:1", timeout=WAIT, retry=Retry(attempts=2), sleep=waits.sleep) as client,
        pytest.raises(Unavailable),
    ):
        client.list_models()
    assert len(waits.seconds) == 1


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


async def test_a_closed_client_says_so(proxy: FakeProxy) -> None:
    """Calls after close, and closing twice: a typed error, and nothing."""
    client = Client(proxy.target)
    client.close()
    client.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.generate("x")
    aclient = AsyncClient(proxy.target)
    await aclient.aclose()
    await aclient.aclose()
    with pytest.raises(InvalidRequest, match="closed"):
        await aclient.list_models()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_client_with_an_impossible_timeout_is_refused(timeout: Any) -> None:
    """The default timeout is checked when the client is made."""
    with pytest.raises(InvalidRequest, match="timeout"):
        Client("127.0.0.1:1", timeout=timeout)
    with pytest.raises(InvalidRequest, match="timeout"):
        AsyncClient("127.0.0.1:1", timeout=timeout)
