"""A fake proxy for the tests of programs that use the SDK: real gRPC, scripted answers.

    with FakeProxy() as proxy, Client(proxy.target) as client:
        proxy.answer("Hello", " world")
        assert client.generate("Hi").text == "Hello world"
        assert proxy.requests[0].text == "Hi"

Answers are given in the order in which they were queued; without one the fake says "ok".
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.rpc import errors
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.status import DETAILS_KEY, details, status_code


class Script:
    """What the fake does with one Generate call."""

    def __init__(self, events: Sequence[serving_pb2.GenerateResponse], error: errors.PdserveError | None, hang: bool):
        self.events = events
        self.error = error
        self.hang = hang
        self.ended = threading.Event()
        """Set when the call is over, also when the client cancelled it."""


class FakeProxy(serving_pb2_grpc.InferenceServicer):
    """A server on a loopback port, as a context manager."""

    def __init__(self, port: int = 0) -> None:
        """`port`: to listen at; 0 takes a free one."""
        self.requests: list[serving_pb2.GenerateRequest] = []
        """Every Generate request, in order of arrival."""
        self.metadata: list[dict[str, str]] = []
        """The metadata of each of them."""
        self.models = [serving_pb2.Model(id="fake", max_model_len=4096)]
        self.topology = serving_pb2.GetTopologyResponse()
        self.unary_errors: deque[errors.PdserveError] = deque()
        """Raised by the next ListModels and GetTopology calls, one each."""
        self._scripts: deque[Script] = deque()
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=list(SERVER_OPTIONS))
        serving_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        """gRPC address."""

    def answer(
        self,
        *texts: str,
        finished: serving_pb2.Finished | None = None,
        error: errors.PdserveError | None = None,
        hang: bool = False,
    ) -> Script:
        """Queues an answer: `started`, a delta of one token per text, then what says how it ends.

        That is `finished`, or else `error`, or else (hang) nothing until the client cancels.
        """
        script = Script(list(_events(texts, finished, cut=hang or error is not None)), error, hang)
        self._scripts.append(script)
        return script

    def answer_events(self, *events: serving_pb2.GenerateResponse) -> Script:
        """Queues exactly these events, in whatever order."""
        script = Script(events, None, False)
        self._scripts.append(script)
        return script

    def refuse(self, error: errors.PdserveError) -> Script:
        """Queues an error before any event."""
        script = Script([], error, False)
        self._scripts.append(script)
        return script

    def Generate(self, request: serving_pb2.GenerateRequest, context: Any) -> Iterator[serving_pb2.GenerateResponse]:
        """Plays the next script."""
        self.requests.append(request)
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata()})
        script = self._scripts.popleft() if self._scripts else Script(list(_events(["ok"], None)), None, False)
        if not context.add_callback(script.ended.set):
            script.ended.set()
        yield from script.events
        if script.error is not None:
            _abort(context, script.error)
        if script.hang:
            script.ended.wait(60)

    def ListModels(self, request: serving_pb2.ListModelsRequest, context: Any) -> serving_pb2.ListModelsResponse:
        """Answers `models`."""
        self._maybe_fail(context)
        return serving_pb2.ListModelsResponse(models=self.models)

    def GetTopology(self, request: serving_pb2.GetTopologyRequest, context: Any) -> serving_pb2.GetTopologyResponse:
        """Answers `topology`."""
        self._maybe_fail(context)
        return self.topology

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait(10)

    def _maybe_fail(self, context: Any) -> None:
        if self.unary_errors:
            _abort(context, self.unary_errors.popleft())


def _events(
    texts: Sequence[str], finished: serving_pb2.Finished | None, *, cut: bool = False
) -> Iterator[serving_pb2.GenerateResponse]:
    yield serving_pb2.GenerateResponse(
        started=serving_pb2.Started(request_id="fake-1", trace_id="0af7651916cd43dd8448eb211c80319c", model="fake")
    )
    for index, text in enumerate(texts):
        delta = serving_pb2.Delta(text=text, token_ids=[index])
        if not cut and index == len(texts) - 1:
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
        yield serving_pb2.GenerateResponse(delta=delta)
    if not cut:
        usage = serving_pb2.Usage(prompt_tokens=1, completion_tokens=len(texts))
        yield serving_pb2.GenerateResponse(finished=finished or serving_pb2.Finished(usage=usage))


def _abort(context: Any, error: errors.PdserveError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, details(error)),))
    context.abort(status_code(error), error.message)
