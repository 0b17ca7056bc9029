"""The engine port over vLLM's AsyncLLM.

A consumer whose hand-over fails and that may not recompute is parked by the connector and aborted
here, with kvd's reason, when the news comes.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from pdserve.engine.checks import check_prompt
from pdserve.engine.handoff import params as handoff_params
from pdserve.engine.port import Consume, EngineInfo, Load, Output, Produce, Request
from pdserve.engine.vllm import news, translate, versions
from pdserve.engine.vllm.launch import Launched, launch
from pdserve.engine.vllm.load import Gauge
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.rpc.errors import (
    EngineDied,
    InvalidRequest,
    Overloaded,
    PdserveError,
    TransferUsed,
    from_reason,
)

log = structlog.get_logger(__name__)

_LIVENESS_S: Final = 0.5
"""How often `failed` looks at vLLM's own flag."""


@dataclass(slots=True)
class _Taking:
    """What the news said of one consumer so far."""

    local_tokens: int = 0
    error: "asyncio.Future[PdserveError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class VllmEngine:
    """See engine.port.Engine. Lives on the loop that ran `start`."""

    def __init__(self, launched: Launched, gauge: Gauge, takings: dict[tuple[bytes, int], _Taking]) -> None:
        self._llm = launched.llm
        self._info = launched.info
        self._defaults = launched.config.model_config.get_diff_sampling_param()
        self._gauge = gauge
        self._takings = takings
        self._closed = asyncio.Event()

    @classmethod
    async def start(cls, settings: VllmSettings) -> "VllmEngine":
        """Starts vLLM; blocks the loop for seconds. Before this process uses gRPC: vLLM forks.

        Raises:
            ConfigError: vLLM or settings that cannot work.
            KvdUnavailable: no kvd at the socket in time.
            PdserveError: kvd refused the engine.
            EngineDied: vLLM did not start; its log says why.
        """
        takings: dict[tuple[bytes, int], _Taking] = {}
        gauge = Gauge(lambda item: _hear(takings, item))
        launched = launch(settings, lambda config, index: gauge)
        gauge.total_tokens = launched.info.num_blocks * launched.info.block_size
        return cls(launched, gauge, takings)

    @property
    def info(self) -> EngineInfo:
        """Fixed facts."""
        return self._info

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs one request; see engine.port.

        Raises:
            InvalidRequest: parameters that the engine refuses; EmptyPrompt, ContextExceeded and
                PoolExceeded among them.
            TransferUsed: another request of this engine takes the same part of the transfer.
            Overloaded: the operator has bounded vLLM's queue, and it is full.
            TransferFailed: a hand-over failed and recomputing was not allowed.
            EngineDied: the engine has ended.
        """
        if self._closed.is_set() or self._llm.errored:
            raise EngineDied("the engine has ended")
        check_prompt(self._info, request.prompt, request.sampling.max_tokens or 1)
        extra = handoff_params.encode(request.kv)
        try:
            params = translate.sampling_params(request.sampling, self._defaults, extra)
        except versions.REFUSED as error:
            raise InvalidRequest(str(error)) from error
        with self._taking(request.kv) as taking:
            async with aclosing(self._outputs(request, params, taking)) as outputs:
                async for output in outputs:
                    yield output

    def load(self) -> Load:
        """The load as of vLLM's last step."""
        return self._gauge.load()

    async def failed(self) -> str:
        """Returns, with the reason, only when vLLM's core has died."""
        while not self._closed.is_set():
            handler = self._llm.output_handler
            if self._llm.errored:
                return "vLLM's engine core has died; its log says why"
            if handler is not None and handler.done():
                return "vLLM's output handler has ended; its log says why"
            waiting = [asyncio.ensure_future(self._closed.wait())] + ([handler] if handler is not None else [])
            await asyncio.wait(waiting, timeout=_LIVENESS_S, return_when=asyncio.FIRST_COMPLETED)
            waiting[0].cancel()
        await asyncio.Event().wait()  # closed on purpose: that is no failure
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Ends vLLM's processes; what was running ends with EngineDied. Safe twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if (handler := self._llm.output_handler) is not None:
            # Left running it would log the end of the core as a failure.
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)
        self._llm.output_processor.propagate_error(versions.CORE_DIED())
        await asyncio.to_thread(self._llm.shutdown)  # joins processes
        # AsyncLLM shuts down once more when it is collected, which fails in a dying interpreter.
        self._llm = _Closed()
        gc.collect()
        log.info("engine.closed", engine_id=self._info.engine_id)

    @contextmanager
    def _taking(self, kv: Produce | Consume | None) -> Iterator[_Taking | None]:
        """Listens for the news of a consumer while its request runs; None for other requests."""
        if not isinstance(kv, Consume):
            yield None
            return
        key = (kv.transfer_id, kv.consumer)
        if key in self._takings:
            raise TransferUsed(f"transfer {key[0].hex()} is being taken by another request")
        taking = self._takings[key] = _Taking()
        try:
            yield taking
        finally:
            del self._takings[key]

    async def _outputs(self, request: Request, params: Any, taking: _Taking | None) -> AsyncGenerator[Output, None]:
        prompt = {"prompt_token_ids": list(request.prompt)}
        try:
            stream = self._llm.generate(prompt, params, request.request_id)
            async with aclosing(stream):
                if taking is not None and not _may_recompute(request):
                    first = await _first(stream, taking.error)
                    yield self._output(request, first, taking)
                    if first.finished:
                        return
                async for raw in stream:
                    yield self._output(request, raw, taking)
        except versions.CORE_DIED as error:
            raise EngineDied("vLLM's engine core has died") from error
        except versions.TOO_MANY as error:
            raise Overloaded(f"vLLM's queue is full: {error}") from error
        except versions.REFUSED as error:
            raise InvalidRequest(str(error)) from error
        except versions.REQUEST_FAILED as error:
            raise PdserveError(f"vLLM failed on the request: {error.__cause__ or error}") from error

    def _output(self, request: Request, raw: Any, taking: _Taking | None) -> Output:
        answer = raw.outputs[0]
        try:
            finish = translate.finish(answer.finish_reason)
        except KeyError:
            # Nobody here reads on after an abort: one that is heard was vLLM's own. A core that was told to stop (a
            # signal to the whole group of processes) gives up what it has before it can be seen to have died.
            if answer.finish_reason == translate.ABORTED or self._closed.is_set() or self._llm.errored:
                raise EngineDied("the engine ended under the request") from None
            raise PdserveError(f"vLLM gave the request up: {answer.finish_reason}") from None
        cached, recomputed = raw.num_cached_tokens or 0, 0
        if taking is not None:
            # vLLM counts what kvd landed as cached; a hand-over that failed leaves only its own.
            failed = taking.error.done()
            cached, recomputed = (cached, len(request.prompt) - cached) if failed else (taking.local_tokens, 0)
        offered = handoff_params.Offered()
        if finish is not None and isinstance(request.kv, Produce):
            offered = handoff_params.decode_offered(raw.kv_transfer_params)
        return Output(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            logprobs=translate.positions(answer.token_ids, answer.logprobs, request.sampling.logprobs or 0),
            finish=finish,
            stop_reason=translate.stop_reason(answer.stop_reason),
            cached_tokens=cached,
            recomputed_tokens=recomputed,
            offered_tokens=offered.tokens,
            offered_blocks=offered.blocks,
            times=translate.times(raw.metrics, offered.last_chunk_ns),
        )


class _Closed:
    """Stands where vLLM was."""

    errored = True
    output_handler = None


async def _first(stream: Any, failure: "asyncio.Future[PdserveError]") -> Any:
    """The first output, or the error that comes before it."""
    output = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait({output, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return await output
    finally:
        if not output.done():
            output.cancel()  # vLLM aborts the request
        await asyncio.gather(output, return_exceptions=True)


def _may_recompute(request: Request) -> bool:
    return isinstance(request.kv, Consume) and request.kv.recompute


def _hear(takings: dict[tuple[bytes, int], _Taking], item: news.News) -> None:
    taking = takings.get((item.transfer_id, item.consumer))
    if taking is None:
        return  # the request has gone
    if isinstance(item, news.Taken):
        taking.local_tokens = item.local_tokens
    elif not taking.error.done():
        taking.error.set_result(from_reason(item.reason, item.detail))
