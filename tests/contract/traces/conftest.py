"""A trace store within the test, on free ports; its clock stands a minute after the made traces."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from pdserve.rpc.channel import aio_channel
from pdserve.runtime.clock import Clock
from pdserve.traces.app import TracesApp
from pdserve.traces.config import TracesConfig
from tests.unit.traces import made

WAIT = 20.0
"""Seconds that anything may take on a busy machine."""


class StoppedClock(Clock):
    """A minute after the made traces."""

    def unix(self) -> float:
        return made.START / 1e9 + 60


class Rig:
    """A running store, and how to talk to it."""

    def __init__(self, app: TracesApp, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.app = app
        self.http = http
        self.export_method: Any = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=ExportTraceServiceRequest.SerializeToString,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )

    @property
    def url(self) -> str:
        return f"http://{self.app.addresses.http}"

    async def export(self, *traces: made.Made) -> ExportTraceServiceResponse:
        """Sends traces."""
        answer: ExportTraceServiceResponse = await self.export_method(made.export(*traces), timeout=WAIT)
        return answer

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """The JSON of an answer, which must have this status."""
        async with self.http.get(self.url + path, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            assert answer.content_type == "application/json"
            return await answer.json()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        config = TracesConfig(otlp_port=0, port=0, file=tmp_path / "traces.sqlite")
        app = await TracesApp.start(config, StoppedClock())
        stack.push_async_callback(app.aclose)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT)))
        channel = await stack.enter_async_context(aio_channel(app.addresses.otlp))
        yield Rig(app, http, channel)
