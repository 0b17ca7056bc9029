"""The HTTP server: reads, calls, writes. A client that goes away cancels its handler."""

import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from pdserve.proxy.http import answers, bodies, errors
from pdserve.proxy.http.answers import Answer, ChatCompletion, Completion, Json, Shape
from pdserve.proxy.inference import Inference
from pdserve.proxy.job import Job
from pdserve.proxy.types import Delta, Finished
from pdserve.proxy.validate import MAX_REQUEST_ID
from pdserve.rpc.errors import InvalidRequest, PdserveError
from pdserve.runtime.listening import HttpPort
from pdserve.runtime.telemetry import serve
from pdserve.runtime.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
Decode = Callable[[bytes, str, str], bodies.Asked]


class HttpServer:
    """Serves the OpenAI API, and the metrics, on one port."""

    def __init__(self, inference: Inference, metrics: Metrics, max_body: int) -> None:
        self._inference = inference
        self._metrics = metrics
        app = web.Application(middlewares=[_typed_errors], client_max_size=max_body)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get(serve.PATH, self._show_metrics)
        self._port = HttpPort(app, handler_cancellation=True)

    async def start(self, host: str, port: int) -> int:
        """Binds and serves; returns the port, 0 takes a free one.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        return await self._port.start(host, port, backlog=1024)

    async def aclose(self) -> None:
        """Stops; open requests are cancelled. Safe twice."""
        await self._port.aclose()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, bodies.completion, Completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, bodies.chat, ChatCompletion)

    async def _generate(self, request: web.Request, decode: Decode, shape: Callable[[], Shape]) -> web.StreamResponse:
        received = self._inference.clock.monotonic_ns()
        headers = request.headers
        request_id = headers.get("X-Request-Id", "") or self._inference.new_request_id()
        if request_id.isprintable() and len(request_id) <= MAX_REQUEST_ID:
            request[REQUEST_ID] = request_id
        body = await request.read()
        with self._inference.taking():
            asked = decode(body, request_id, headers.get("traceparent", ""))
            job = await self._inference.prepare(asked.ask, received)
        created = int(self._inference.clock.unix())
        answer = Answer(shape(), job.request_id, job.trace.trace_id, job.model, created)
        if asked.stream:
            return await self._stream(request, job, answer, include_usage=asked.include_usage)
        return await self._whole(job, answer)

    async def _whole(self, job: Job, answer: Answer) -> web.Response:
        async with contextlib.aclosing(self._inference.run(job)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    answer.collect(event)
                elif isinstance(event, Finished):
                    return _json(answer.whole(event), job.request_id)
        raise PdserveError("the answer ended without its end")

    async def _stream(
        self, request: web.Request, job: Job, answer: Answer, *, include_usage: bool
    ) -> web.StreamResponse:
        """The status line goes out with the first token, so that an earlier error has its own."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Request-Id": job.request_id}
        )
        held: Json | None = None  # a chunk that ends an answer waits for what `Finished` adds to the last
        try:
            async with contextlib.aclosing(self._inference.run(job)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        if not response.prepared:
                            await response.prepare(request)
                        if held is not None:
                            await response.write(answers.event(held))
                            held = None
                        chunk = answer.chunk(event, usage_follows=include_usage)
                        if event.finish is None:
                            await response.write(answers.event(chunk))
                        else:
                            held = chunk
                    elif isinstance(event, Finished):
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(_end(answer, held, event, include_usage=include_usage))
        except PdserveError as error:
            if not response.prepared:
                raise
            last = answers.event(held) if held is not None else b""
            await response.write(last + b"data: " + errors.body(error) + b"\n\n")
        except ConnectionError:
            return response  # the client is gone; the request's record says so
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        created = int(self._inference.clock.unix())
        data = [
            {
                "id": model.id,
                "object": "model",
                "created": created,
                "owned_by": "pdserve",
                "max_model_len": model.max_model_len,
            }
            for model in self._inference.models()
        ]
        return _json({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        """200 while a text could be placed, with the models of which that is so; else why not."""
        return _json({"status": "ok", "models": self._inference.placeable()})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return serve.answer(self._metrics)


def _end(answer: Answer, held: Json | None, done: Finished, *, include_usage: bool) -> bytes:
    parts: list[bytes] = []
    if include_usage:
        if held is not None:
            parts.append(answers.event(held))
        parts.append(answers.event(answer.usage_chunk(done)))
    elif held is not None:
        parts.append(answers.event(answer.last_chunk(held, done)))
    return b"".join((*parts, b"data: [DONE]\n\n"))


def _json(body: Json, request_id: str = "") -> web.Response:
    headers = {"X-Request-Id": request_id} if request_id else None
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", headers=headers)


def _refused(request: web.Request, error: PdserveError, status: int) -> web.Response:
    request_id = request.get(REQUEST_ID, "")
    headers = {"X-Request-Id": request_id} if request_id else None
    return web.Response(body=errors.body(error), status=status, content_type="application/json", headers=headers)


@web.middleware
async def _typed_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error in OpenAI's form, aiohttp's own too."""
    try:
        return await handler(request)
    except PdserveError as error:
        return _refused(request, error, errors.status(error))
    except web.HTTPRequestEntityTooLarge:
        return _refused(request, InvalidRequest("the body is too large"), 413)
    except web.HTTPException as error:
        return _refused(request, InvalidRequest(f"{request.method} {request.path}: {error.reason}"), error.status)
    except ConnectionError:
        raise  # nobody is left to answer
    except Exception as error:  # the edge of the process: what nobody foresaw becomes INTERNAL
        log.error("unexpected_error", path=request.path, exc_info=error)
        return _refused(request, PdserveError(f"{type(error).__name__}: {error}"), 500)
