"""Both clients, and their streams, that are closed or left while something goes on. A fake proxy over real gRPC."""

import asyncio
import threading

import pytest

from pdserve.client import (
    AsyncClient,
    Client,
    InvalidRequest,
    PdserveError,
    RequestCancelled,
)
from pdserve.client.testing import FakeProxy
from tests.unit.client.calls.waits import WAIT


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
