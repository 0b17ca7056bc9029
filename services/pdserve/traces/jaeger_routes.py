"""Jaeger's query API over the store: the routes that its page and Grafana's data source ask for."""

from aiohttp import web

from pdserve.runtime.clock import Clock
from pdserve.traces import jaeger, params
from pdserve.traces.respond import refuse, respond
from pdserve.traces.search import Search
from pdserve.traces.span import Span
from pdserve.traces.store import Store


class JaegerRoutes:
    """v1, and of v3 what lists."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Adds the routes."""
        for path, handler in (
            ("/api/services", self._services),
            ("/api/services/{service}/operations", self._operation_names),
            ("/api/operations", self._operations),
            ("/api/traces", self._traces),
            ("/api/traces/{trace_id}", self._trace),
            ("/api/dependencies", self._dependencies),
            ("/api/metrics/{which}", self._metrics),
            ("/api/v3/services", self._v3_services),
            ("/api/v3/operations", self._v3_operations),
            ("/api/v3/trace-summaries", self._v3_summaries),
        ):
            router.add_get(path, handler)

    async def _services(self, _: web.Request) -> web.Response:
        names = await self._store.ask(lambda reader: reader.services())
        return respond(jaeger.envelope(names, total=len(names)))

    async def _operation_names(self, request: web.Request) -> web.Response:
        found = await self._found_operations(request.match_info["service"])
        names = list(dict.fromkeys(name for name, _ in found))
        return respond(jaeger.envelope(names, total=len(names)))

    async def _operations(self, request: web.Request) -> web.Response:
        query = request.query
        if not query.get("service"):
            return refuse(400, "parameter 'service' is required")
        found = await self._found_operations(query["service"], query.get("spanKind", ""))
        return respond(jaeger.envelope(jaeger.operations(found), total=len(found)))

    async def _traces(self, request: web.Request) -> web.Response:
        query = request.query
        wanted = [params.trace_id(text) for text in query.getall("traceID", ())]
        if wanted:
            found = await self._store.ask(lambda reader: reader.traces(wanted[: params.MAX_TRACES]))
        elif not query.get("service"):
            return refuse(400, "parameter 'service' is required")
        else:
            found = await self._find(params.search(query, self._now()))
        return respond(jaeger.envelope([jaeger.trace(spans) for spans in found], total=len(found)))

    async def _trace(self, request: web.Request) -> web.Response:
        trace_id = params.trace_id(request.match_info["trace_id"])
        found = await self._store.ask(lambda reader: reader.traces([trace_id]))
        if not found:
            return refuse(404, "trace not found", trace_id)
        return respond(jaeger.envelope([jaeger.trace(found[0])], total=1))

    async def _dependencies(self, request: web.Request) -> web.Response:
        start, end = params.span_of_time(request.query, self._now())
        found = await self._store.ask(lambda reader: reader.dependencies(start, end))
        return respond(jaeger.envelope([jaeger.dependency(*row) for row in found], total=len(found)))

    async def _metrics(self, _: web.Request) -> web.Response:
        """As Jaeger without a metrics store: its Monitor tab then says so."""
        return refuse(501, "metrics querying is currently disabled")

    async def _v3_services(self, _: web.Request) -> web.Response:
        return respond({"services": await self._store.ask(lambda reader: reader.services())})

    async def _v3_operations(self, request: web.Request) -> web.Response:
        query = request.query
        found = await self._found_operations(query.get("service", ""), query.get("span_kind", ""))
        return respond({"operations": jaeger.operations(found)})

    async def _v3_summaries(self, request: web.Request) -> web.Response:
        found = await self._find(params.search_v3(request.query, self._now()))
        return respond({"summaries": [jaeger.summary(spans) for spans in found]})

    async def _found_operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        return await self._store.ask(lambda reader: reader.operations(service, kind))

    async def _find(self, search: Search) -> list[list[Span]]:
        return await self._store.ask(lambda reader: reader.traces(reader.find(search)))

    def _now(self) -> int:
        return int(self._clock.unix() * 1e9)
