"""The HTTP server: the page, our own API, and the frame in which Jaeger's is served too."""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping

import structlog
from aiohttp import web

from pdserve.rpc.errors import DeadlinePassed, InvalidRequest, PdserveError
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import is_local
from pdserve.runtime.listening import HttpPort
from pdserve.traces import answers, ids, params, percentiles
from pdserve.traces.jaeger_routes import JaegerRoutes
from pdserve.traces.page_files import HEADERS, File
from pdserve.traces.reading import Reader
from pdserve.traces.requests import Request
from pdserve.traces.respond import refuse, respond
from pdserve.traces.span import Span
from pdserve.traces.store import Store

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STATUS = {InvalidRequest: 400, DeadlinePassed: 504}
_NAMED = 20
"""Of the traces that an id may mean, as many are told."""


class HttpServer:
    """Serves on one port."""

    def __init__(self, store: Store, clock: Clock, files: Mapping[str, File], *, local: bool) -> None:
        """`local`: requests must be addressed to this host by name or number, so that no other site's page can
        have a browser ask for it under a name of its own."""
        self._store = store
        self._clock = clock
        self._files = files
        app = web.Application(middlewares=[_frame, *([_addressed_here] if local else [])])
        app.router.add_get("/api/pdserve/requests", self._requests)
        app.router.add_get("/api/pdserve/trace/{called}", self._trace)
        app.router.add_get("/api/pdserve/parts", self._parts)
        JaegerRoutes(store, clock).add_to(app.router)
        for path in files:
            app.router.add_get(path, self._file)
        self._port = HttpPort(app, handler_cancellation=True)

    async def start(self, host: str, port: int) -> int:
        """Binds and serves; returns the port, 0 takes a free one.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        return await self._port.start(host, port)

    async def aclose(self) -> None:
        """Stops; open requests are cancelled. Safe twice."""
        await self._port.aclose()

    async def _file(self, request: web.Request) -> web.Response:
        file = self._files[request.path]
        return web.Response(body=file.content, headers={"Content-Type": file.type})

    async def _requests(self, request: web.Request) -> web.Response:
        query = request.query
        limit = params.number(query, "limit", 50, params.MAX_REQUESTS)
        mode, outcome, model, called = (query.get(name, "") for name in ("mode", "outcome", "model", "id"))
        rows = await self._store.ask(
            lambda reader: reader.requests(limit, mode=mode, outcome=outcome, model=model, called=called)
        )
        return respond({"requests": [answers.request(row) for row in rows]})

    async def _trace(self, request: web.Request) -> web.Response:
        called = request.match_info["called"]

        def ask(reader: Reader) -> tuple[list[Request], list[list[Span]]]:
            named = reader.requests(_NAMED, called=called)
            traces = {row.trace_id: None for row in named}
            if len(traces) > 1:
                raise InvalidRequest(f"{called[:64]!r} may be of the traces {', '.join(traces)}: say more of it")
            wanted = next(iter(traces), "") or ids.trace(called)
            # A request that is called by its own id is the one that is meant; by its trace's, that has its first.
            itself = [row for row in named if ids.read(called).means(row.request_id)]
            return itself or reader.requests_of(wanted), reader.traces([wanted])

        requests, found = await self._store.ask(ask)
        if not found:
            return refuse(404, "trace not found", called[:64])
        return respond(answers.trace(found[0][0].trace_id, requests, found[0]))

    async def _parts(self, request: web.Request) -> web.Response:
        query = request.query
        window = params.number(query, "window", 3600, 10 * 365 * 24 * 3600)
        bucket = params.number(query, "bucket", min(window, max(60, -(-window // params.MAX_BUCKETS))), window)
        if window // bucket > params.MAX_BUCKETS:
            raise InvalidRequest(f"window / bucket is {window // bucket}, at most {params.MAX_BUCKETS} buckets fit")
        since, mode = int((self._clock.unix() - window) * 1e9), query.get("mode", "")
        return respond(
            await self._store.ask(lambda reader: percentiles.table(reader.timings(since, mode), bucket * 10**6))
        )


@web.middleware
async def _frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer with the headers that keep a browser in, every error in Jaeger's form."""
    try:
        response = await handler(request)
    except PdserveError as error:
        response = refuse(_STATUS.get(type(error), 500), error.message)
    except web.HTTPException as error:
        response = refuse(error.status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionError:
        raise  # nobody is left to answer
    except Exception as error:  # the edge of the process: what nobody foresaw
        log.error("unexpected_error", path=request.path, exc_info=error)
        response = refuse(500, f"{type(error).__name__}: {error}")
    response.headers.update(HEADERS)
    return response


@web.middleware
async def _addressed_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    name = re.sub(r":\d+$", "", request.host)
    if not is_local(name) and not _is_number(name):
        raise InvalidRequest(f"Host {name[:64]!r} is not this host: use its address, or localhost")
    return await handler(request)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
