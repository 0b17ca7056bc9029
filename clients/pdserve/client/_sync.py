"""The blocking client."""

import random as random_module
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.client import _call, _codec
from pdserve.client import _types as t
from pdserve.client._assembly import Assembly
from pdserve.client._retry import Attempts, Retry, Told, not_ours, unheard
from pdserve.rpc import errors
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.status import to_error

T = TypeVar("T")


class Client:
    """Talks to a proxy. Safe to share between threads; close it, or use it as a context manager.

    Every call raises one of `pdserve.client`'s errors and no other: see pdserve.rpc.errors for the
    tree. Calls that failed as UNAVAILABLE before a token came are sent again, within `timeout`.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = 600.0,
        retry: Retry | None = None,
        on_retry: Told = unheard,
        random: Callable[[], float] = random_module.random,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects at the first call.

        Args:
            target: the proxy's gRPC address, `host:port` or `unix:path`.
            timeout: seconds that a call may take with its retries, where it says nothing else.
            retry: how long, how often and how soon; None: `Retry()`.
            on_retry: is told of each failure that is followed by another send, and of the seconds until then.
            random: source of the jitter, in [0, 1).
            sleep: waits between retries.
        """
        _call.check_timeout(timeout)
        self._timeout = timeout
        self._retry = retry or Retry()
        self._on_retry = on_retry
        self._random = random
        self._sleep = sleep
        self._channel = sync_channel(target)
        self._stub = serving_pb2_grpc.InferenceStub(self._channel)
        self._closed = threading.Event()

    def generate(self, prompt: _codec.Prompt, **fields: Unpack[_call.CallFields]) -> t.Completion:
        """The whole answer to a text or token-id prompt."""
        with self.stream(prompt, **fields) as stream:
            return stream.completion()

    def chat(self, messages: _codec.Messages, **fields: Unpack[_call.CallFields]) -> t.Completion:
        """The whole answer to a conversation."""
        with self.stream_chat(messages, **fields) as stream:
            return stream.completion()

    def stream(self, prompt: _codec.Prompt, **fields: Unpack[_call.CallFields]) -> "Stream":
        """The answer to a text or token-id prompt as it is made; the request is sent when reading begins."""
        return self._start(_call.build(fields, prompt=prompt))

    def stream_chat(self, messages: _codec.Messages, **fields: Unpack[_call.CallFields]) -> "Stream":
        """The answer to a conversation as it is made; the request is sent when reading begins."""
        return self._start(_call.build(fields, messages=messages))

    def list_models(self, *, timeout: float | None = None) -> tuple[t.Model, ...]:
        """The models that can be asked for now."""
        return _codec.models(self._unary(self._stub.ListModels, serving_pb2.ListModelsRequest(), timeout))

    def topology(self, *, timeout: float | None = None) -> t.Topology:
        """The engines behind the proxy and their state."""
        return _codec.topology(self._unary(self._stub.GetTopology, serving_pb2.GetTopologyRequest(), timeout))

    def close(self) -> None:
        """Ends every call under way and the connection; safe twice."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, call: _call.Call) -> "Stream":
        def send(timeout: float) -> Any:
            self._check_open()
            return self._stub.Generate(call.request, timeout=timeout, metadata=call.metadata)

        attempts = Attempts(self._retry, call.timeout or self._timeout, self._on_retry)
        return Stream(send, attempts, self._random, self._sleep, self._closed)

    def _unary(self, method: Callable[..., T], request: Any, timeout: float | None) -> T:
        attempts = Attempts(self._retry, _call.check_timeout(timeout) or self._timeout, self._on_retry)
        while True:
            self._check_open()
            left = attempts.begin(time.monotonic())
            try:
                return method(request, timeout=left)
            except grpc.RpcError as error:
                failure = not_ours(to_error(error), self._closed.is_set())
                self._sleep(attempts.after(failure, time.monotonic(), self._random()))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise errors.InvalidRequest("the client is closed")


class Stream(Iterator[t.Delta]):
    """One answer under way: iterate over its deltas, then read `completion()`.

    As a context manager it cancels the request at exit, if it still runs. For one thread.
    """

    def __init__(
        self,
        send: Callable[[float], Any],
        attempts: Attempts,
        random: Callable[[], float],
        sleep: Callable[[float], None],
        client_closed: threading.Event,
    ) -> None:
        self._send = send
        self._client_closed = client_closed
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

    def __next__(self) -> t.Delta:
        """The next delta.

        Raises:
            PdserveError: the request failed, or was cancelled by `close`.
        """
        while self._assembly.completion is None:
            if self._closed:
                raise errors.RequestCancelled("the stream was closed before its end")
            delta = self._read()
            if delta is not None:
                return delta
        raise StopIteration

    def completion(self) -> t.Completion:
        """Reads what is left and returns the whole answer.

        Raises:
            PdserveError: the request failed, or was cancelled by `close`.
        """
        for _ in self:
            pass
        return self._assembly.end()

    def close(self) -> None:
        """Cancels the request if it still runs; safe twice."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> t.Delta | None:
        """One event, from the call under way or a new one; None where it was no delta."""
        if self._call is None:
            self._call = self._send(self._attempts.begin(time.monotonic()))
        try:
            return self._assembly.feed(next(self._call))
        except StopIteration:
            self._assembly.end()
            return None
        except grpc.RpcError as error:
            failure = not_ours(to_error(error), self._closed or self._client_closed.is_set())
            if self._assembly.any_delta:
                raise failure from error  # tokens are out: a second answer could differ
            delay = self._attempts.after(failure, time.monotonic(), self._random())
        self._assembly, self._call = Assembly(), None
        self._sleep(delay)
        return None
