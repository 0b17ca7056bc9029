"""What the proxy's benchmarks stand on: a proxy and engines that answer at once, a process each, and their client.

With simulated engines and kvd in their place: bench_fleet.py.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from grpc import aio as grpc_aio

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.rpc.channel import aio_channel
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import names

PROMPT = "x" * 256
_START_S = 30.0
"""Longest wait for a process to listen, and for engines to be routable; the machine may be busy."""
_COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
_COUNTS = "bench.Collector"
_ONCE = names.E2E.encode()
"""What each request's trace has once: an attribute of its root."""

One = Callable[[], Coroutine[Any, Any, float]]
"""Runs a request; its TTFT in seconds."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request is."""

    face: str
    """http, grpc, or direct: the client plays READ's two legs itself."""
    mode: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A proxy that has its two engines."""

    grpc: str
    http: str
    pid: int
    engines: Sequence[serving_pb2.EngineStatus]


async def engines(registration: str) -> None:
    """A prefill and a decode engine that beat until they are killed."""
    handovers = Handovers()
    fleet = [FakeEngine(role, Signer(INSECURE_KEY), handovers, pool=1 << 20) for role in ("prefill", "decode")]
    for engine in fleet:
        engine.max_model_len = 4096
        await engine.start()
        await engine.register(registration)
    while True:
        await asyncio.sleep(1.0)
        for engine in fleet:
            await engine.beat()


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
        said = await count(b"", timeout=_START_S)
    return int(said)


@contextlib.asynccontextmanager
async def standing() -> AsyncIterator[Standing]:
    """Starts a proxy and its engines; ends them."""
    ports = [free_port() for _ in range(3)]
    flags = [f"--{name}={port}" for name, port in zip(("grpc-port", "http-port", "ping-port"), ports, strict=True)]
    grpc_at, http_at, registration = (f"127.0.0.1:{port}" for port in ports)
    async with (
        process("pdserve.proxy", *flags, "--log-level=error") as pid,
        process("pdserve.proxy.bench", "--engines", registration),
    ):
        yield Standing(grpc_at, http_at, pid, await routable(grpc_at))


@contextlib.asynccontextmanager
async def asking(at: Standing, ask: Ask) -> AsyncIterator[One]:
    """Runs requests over channels that are kept open."""
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(aio_channel(at.grpc))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        stub: serving_pb2_grpc.InferenceAsyncStub = serving_pb2_grpc.InferenceStub(channel)
        mode = common_pb2.TRANSFER_MODE_READ if ask.mode == "read" else common_pb2.TRANSFER_MODE_WRITE
        request = serving_pb2.GenerateRequest(text=PROMPT, mode=mode)
        request.sampling.max_tokens = ask.tokens
        body = {"prompt": PROMPT, "max_tokens": ask.tokens, "stream": True, "pdserve": {"mode": ask.mode}}
        targets = {engine.role: await stack.enter_async_context(aio_channel(engine.address)) for engine in at.engines}
        legs = (
            prefill_pb2_grpc.PrefillStub(targets[common_pb2.ENGINE_ROLE_PREFILL]),
            decode_pb2_grpc.DecodeStub(targets[common_pb2.ENGINE_ROLE_DECODE]),
        )

        async def over_grpc() -> float:
            begun, first = time.perf_counter(), 0.0
            async for event in stub.Generate(request):
                if not first and event.HasField("delta"):
                    first = time.perf_counter() - begun
            return first

        async def over_http() -> float:
            begun = time.perf_counter()
            async with session.post(f"http://{at.http}/v1/completions", json=body) as response:
                response.raise_for_status()
                await response.content.readline()
                first = time.perf_counter() - begun
                await response.read()
            return first

        async def direct() -> float:
            begun, first = time.perf_counter(), 0.0
            ids, transfer_id = list(PROMPT.encode()), os.urandom(16)
            prefill = legs[0].Prefill(prefill_pb2.PrefillRequest(prompt_token_ids=ids, transfer_id=transfer_id))
            await prefill.read()
            order = decode_pb2.DecodeRequest(prompt_token_ids=ids)
            order.sampling.max_tokens = ask.tokens
            order.source.transfer_id = transfer_id
            async for event in legs[1].Decode(order):
                if not first and event.HasField("tokens"):
                    first = time.perf_counter() - begun
            while await prefill.read() is not grpc_aio.EOF:
                pass
            return first

        yield {"http": over_http, "grpc": over_grpc, "direct": direct}[ask.face]


@contextlib.asynccontextmanager
async def process(*words: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[int]:
    """`python -m` with these words and, of OpenTelemetry's variables, these alone; its id. Killed at the end."""
    # What the caller's shell says of telemetry would be measured too.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *words, env=ours | dict(environ or {}))
    try:
        yield child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        await child.wait()


async def routable(address: str) -> list[serving_pb2.EngineStatus]:
    """The two engines of the proxy at this gRPC address, when it can use them.

    Raises:
        TimeoutError: it cannot.
    """
    await listening(address)
    async with asyncio.timeout(_START_S), aio_channel(address) as channel:
        stub: serving_pb2_grpc.InferenceAsyncStub = serving_pb2_grpc.InferenceStub(channel)
        while True:
            engines = (await stub.GetTopology(serving_pb2.GetTopologyRequest())).engines
            if len(engines) == 2 and not any(engine.excluded_because for engine in engines):
                return list(engines)
            await asyncio.sleep(0.05)


async def listening(address: str) -> None:
    """Waits until somebody takes connections there.

    Raises:
        TimeoutError: nobody does.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
