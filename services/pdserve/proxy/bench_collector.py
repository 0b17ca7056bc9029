"""A collector of traces that does nothing with them, for the proxy's benchmarks."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio as grpc_aio

from pdserve.proxy.bench_processes import START_S, free_port, listening, process
from pdserve.rpc.channel import aio_channel
from pdserve.runtime.telemetry import names

_COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
_COUNTS = "bench.Collector"
_ONCE = names.E2E.encode()
"""What each request's trace has once: an attribute of its root."""


async def collector(address: str) -> None:
    """Takes OTLP's batches unread, which is the least that a collector costs, until it is killed; says how many
    requests' traces were in them."""
    taken = 0

    async def export(batch: bytes, _: Any, /) -> bytes:
        nonlocal taken
        taken += batch.count(_ONCE)
        return b""

    async def count(_: bytes, __: Any, /) -> bytes:
        return str(taken).encode()

    server = grpc_aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {_COLLECTOR: {"Export": export}, _COUNTS: {"Count": count}}
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                service, {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
            )
            for service, methods in handlers.items()
        ]
    )
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[str]:
    """The address of a collector in a process of its own."""
    address = f"127.0.0.1:{free_port()}"
    async with process("pdserve.proxy.bench", "--collector", address):
        await listening(address)
        yield address


async def traces(address: str) -> int:
    """How many a collector has taken."""
    async with aio_channel(address) as channel:
        count: grpc_aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{_COUNTS}/Count")
        said = await count(b"", timeout=START_S)
    return int(said)
