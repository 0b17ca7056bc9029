"""Builds the trace store out of its parts and closes them in reverse."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import NoReturn

import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from pdserve.runtime.clock import Clock
from pdserve.runtime.config import is_local, join_address
from pdserve.runtime.lifecycle import Tasks
from pdserve.runtime.server import Server
from pdserve.traces import page_files
from pdserve.traces.config import TracesConfig
from pdserve.traces.http import HttpServer
from pdserve.traces.receiver import MAX_CALLS, SERVICE, Receiver
from pdserve.traces.store import Store

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where it listens, as `host:port`."""

    otlp: str
    http: str


class TracesApp:
    """A running trace store; `start` makes one, `aclose` ends it."""

    def __init__(
        self,
        addresses: Addresses,
        receiver: Receiver,
        server: Server,
        tasks: Tasks,
        grace: float,
        closing: contextlib.AsyncExitStack,
    ) -> None:
        self.addresses = addresses
        self.receiver = receiver
        self._server = server
        self._tasks = tasks
        self._grace = grace
        self._closing = closing

    @classmethod
    async def start(cls, config: TracesConfig, clock: Clock) -> "TracesApp":
        """Opens the file, binds and serves.

        Raises:
            ConfigError: the file cannot be used, or a port cannot be bound.
        """
        async with contextlib.AsyncExitStack() as stack:
            store = await asyncio.to_thread(Store, config.path, config.max_bytes, config.max_age, clock)
            stack.push_async_callback(store.aclose)
            files = await asyncio.to_thread(page_files.load)
            if "/" not in files:
                log.warning("no_page", means="this build serves the API alone")
            tasks = await stack.enter_async_context(Tasks())
            tasks.start("keep_small", store.keep_small())
            http = HttpServer(store, clock, files, local=is_local(config.host))
            stack.push_async_callback(http.aclose)
            http_port = await http.start(config.host, config.port)
            server = Server([SERVICE], max_message=config.max_export, max_calls=MAX_CALLS)
            receiver = Receiver(store, config.max_export)
            add_TraceServiceServicer_to_server(receiver, server.grpc)  # type: ignore[no-untyped-call]  # generated, untyped
            otlp_port = server.bind(config.host, config.otlp_port)
            stack.push_async_callback(server.stop)
            await server.start()
            await server.serving(True)
            addresses = Addresses(join_address(config.host, otlp_port), join_address(config.host, http_port))
            return cls(addresses, receiver, server, tasks, config.drain_timeout, stack.pop_all())

    async def failed(self) -> NoReturn:
        """Waits for a background task to die and raises why."""
        await self._tasks.failed()

    async def drain(self) -> None:
        """Takes no new export and waits for what there is; the caller bounds the wait."""
        await self._server.serving(False)
        await self._server.stop(self._grace)

    async def aclose(self) -> None:
        """Ends everything; safe twice."""
        await self._closing.aclose()
