"""Calls that are sent again, by both clients, and those that are not. A fake proxy over real gRPC."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pdserve.api.serving.v1 import serving_pb2
from pdserve.client import (
    AsyncClient,
    Client,
    NoEngines,
    PdserveError,
    Retry,
    Unavailable,
)
from pdserve.client.testing import FakeProxy
from tests.unit.client.calls.waits import WAIT, Waits


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
