"""A server of the page with canned answers, under the content policy that the real one sends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.page.samples import Json, nothing

FOLDER = Path(__file__).resolve().parents[2] / "services" / "pdserve" / "traces" / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass
class Store:
    """What the stub answers with; a test changes it while the page is open."""

    requests: list[Json] = field(default_factory=list)
    traces: dict[str, Json] = field(default_factory=dict)
    parts: dict[str, Json] = field(default_factory=dict)
    """By mode."""
    failure: web.Response | None = None
    """Of every call of the API; a body that can be sent once per call."""
    asked: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def calls(self, count: int, timeout: float = 10.0) -> None:
        """Waits until the API has been called `count` times more."""
        wanted = len(self.asked) + count
        async with self.changed, asyncio.timeout(timeout):
            await self.changed.wait_for(lambda: len(self.asked) >= wanted)


@asynccontextmanager
async def serving(store: Store) -> AsyncIterator[str]:
    """Serves page and API on a free port; gives the address."""

    async def api(request: web.Request) -> web.StreamResponse:
        async with store.changed:
            store.asked.append(request.path_qs)
            store.changed.notify_all()
        if store.failure is not None:
            said = store.failure
            return web.Response(status=said.status, text=said.text, content_type=said.content_type)
        kind, query = request.match_info["kind"], request.query
        if kind == "requests":
            rows = [
                row
                for row in store.requests
                if all(not query.get(name) or row[name] == query[name] for name in ("mode", "outcome", "model"))
            ]
            return web.json_response({"requests": rows[: int(query.get("limit", 50))]})
        if kind == "parts":
            return web.json_response(store.parts.get(query.get("mode", ""), nothing()))
        called = kind.removeprefix("trace/")
        named = next((row["trace_id"] for row in store.requests if row["request_id"] == called), called)
        found = store.traces.get(named)
        if found is None:
            return web.json_response({"errors": [{"code": 404, "msg": "no such trace"}]}, status=404)
        return web.json_response(found)

    async def file(request: web.Request) -> web.StreamResponse:
        path = FOLDER / (request.match_info.get("name", "index.html"))
        if path.parent != FOLDER or not path.is_file():
            raise web.HTTPNotFound
        headers = {"Content-Security-Policy": POLICY, "Content-Type": TYPES[path.suffix]}
        return web.Response(body=path.read_bytes(), headers=headers)

    app = web.Application()
    app.router.add_get("/api/pdserve/{kind:.+}", api)
    app.router.add_get("/{name}", file)
    app.router.add_get("/", file)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
