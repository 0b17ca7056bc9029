"""The asyncio client."""

import asyncio
import random as random_module
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.client import _call, _codec
from pdserve.client import _types as t
from pdserve.client._assembly import Assembly
from pdserve.client._retry import Attempts, Retry, Told, not_ours, unheard
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited. For one event loop."""

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 600.0,
        retry: Retry | None = None,
        on_retry: Told = unheard,
        random: Callable[[], float] = random_module.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Connects at the first call; the arguments are those of `Client`."""
        self._target = target
        _call.check_timeout(timeout)
        self._timeout = timeout
        self._retry = retry or Retry()
        self._on_retry = on_retry
        self._random = random
        self._sleep = sleep
        # Made at the first call: grpc ties a channel to the event loop that runs when it is made.
        self._channel: grpc.aio.Channel | None = None
        self._made: serving_pb2_grpc.InferenceAsyncStub | None = None
        self._closed = False

    async def generate(self, prompt: _codec.Prompt, **fields: Unpack[_call.CallFields]) -> t.Completion:
        """The whole answer to a text or token-id prompt."""
        async with self.stream(prompt, **fields) as stream:
            return await stream.completion()

    async def chat(self, messages: _codec.Messages, **fields: Unpack[_call.CallFields]) -> t.Completion:
        """The whole answer to a conversation."""
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.completion()

    def stream(self, prompt: _codec.Prompt, **fields: Unpack[_call.CallFields]) -> "AsyncStream":
        """The answer to a text or token-id prompt as it is made; the request is sent when reading begins."""
        return self._start(_call.build(fields, prompt=prompt))

    def stream_chat(self, messages: _codec.Messages, **fields: Unpack[_call.CallFields]) -> "AsyncStream":
        """The answer to a conversation as it is made; the request is sent when reading begins."""
        return self._start(_call.build(fields, messages=messages))

    async def list_models(self, *, timeout: float | None = None) -> tuple[t.Model, ...]:
        """The models that can be asked for now."""
        request = serving_pb2.ListModelsRequest()
        return _codec.models(await self._unary(lambda left: self._stub().ListModels(request, timeout=left), timeout))

    async def topology(self, *, timeout: float | None = None) -> t.Topology:
        """The engines behind the proxy and their state."""
        request = serving_pb2.GetTopologyRequest()
        return _codec.topology(await self._unary(lambda left: self._stub().GetTopology(request, timeout=left), timeout))

    async def aclose(self) -> None:
        """Ends every call under way and the connection; safe twice."""
        self._closed = True
        channel, self._channel, self._made = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stub(self) -> "serving_pb2_grpc.InferenceAsyncStub":
        if self._closed:
            raise errors.InvalidRequest("the client is closed")
        if self._made is None:
            self._channel = aio_channel(self._target)
            self._made = serving_pb2_grpc.InferenceStub(self._channel)
        return self._made

    def _start(self, call: _call.Call) -> "AsyncStream":
        def send(timeout: float) -> Any:
            return self._stub().Generate(call.request, timeout=timeout, metadata=call.metadata)

        attempts = Attempts(self._retry, call.timeout or self._timeout, self._on_retry)
        return AsyncStream(send, attempts, self._random, self._sleep)

    async def _unary(self, send: Callable[[float], Awaitable[T]], timeout: float | None) -> T:
        attempts = Attempts(self._retry, _call.check_timeout(timeout) or self._timeout, self._on_retry)
        while True:
            left = attempts.begin(time.monotonic())
            try:
                return await send(left)
            except grpc.aio.AioRpcError as error:
                failure = not_ours(to_error(error), self._closed)
                delay = attempts.after(failure, time.monotonic(), self._random())
            await self._sleep(delay)


class AsyncStream(AsyncIterator[t.Delta]):
    """One answer under way: iterate over its deltas, then await `completion()`.

    As an async context manager it cancels the request at exit, if it still runs. For one task.
    """

    def __init__(
        self,
        send: Callable[[float], Any],
        attempts: Attempts,
        random: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._send = send
        self._attempts = attempts
        self._random = random
        self._sleep = sleep
        self._assembly = Assembly()
        self._call: Any = None
        self._closed = False

    @property
    def request_id(self) -> str:
        """The proxy's name for the request; empty before it was taken."""
        return self._assembly.started.request_id if self._assembly.started else ""

    @property
    def trace_id(self) -> str:
        """W3C trace id; empty before the request was taken."""
        return self._assembly.started.trace_id if self._assembly.started else ""

    async def __anext__(self) -> t.Delta:
        """The next delta.

        Raises:
            PdserveError: the request failed, or was cancelled by `aclose`.
        """
        while self._assembly.completion is None:
            if self._closed:
                raise errors.RequestCancelled("the stream was closed before its end")
            delta = await self._read()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def completion(self) -> t.Completion:
        """Reads what is left and returns the whole answer.

        Raises:
            PdserveError: the request failed, or was cancelled by `aclose`.
        """
        async for _ in self:
            pass
        return self._assembly.end()

    async def aclose(self) -> None:
        """Cancels the request if it still runs; safe twice."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> t.Delta | None:
        """One event, from the call under way or a new one; None where it was no delta."""
        if self._call is None:
            self._call = self._send(self._attempts.begin(time.monotonic()))
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            failure = not_ours(to_error(error), self._closed)  # a client that is closed raises what is below
            if self._assembly.any_delta:
                raise failure from error  # tokens are out: a second answer could differ
            delay = self._attempts.after(failure, time.monotonic(), self._random())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled: the stream or the client was closed under it.
            raise errors.RequestCancelled("the stream was closed before its end") from None
        else:
            if event is grpc.aio.EOF:
                self._assembly.end()
                return None
            return self._assembly.feed(event)
        self._assembly, self._call = Assembly(), None
        await self._sleep(delay)
        return None
