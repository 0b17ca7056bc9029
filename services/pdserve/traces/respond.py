"""JSON answers of the HTTP server."""

import msgspec
from aiohttp import web

from pdserve.traces.jaeger import Json, failure


def respond(body: Json, status: int = 200) -> web.Response:
    """JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def refuse(status: int, message: str, trace_id: str = "") -> web.Response:
    """An error, in Jaeger's form."""
    return respond(failure(status, message, trace_id), status)
