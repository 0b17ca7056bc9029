"""What the proxy's benchmarks stand on: a proxy and engines that answer at once, a process each, and their client.

With simulated engines and kvd in their place: bench_fleet.py. The processes themselves: bench_processes.py.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from grpc import aio as grpc_aio

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.bench_processes import START_S, free_port, listening, process
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.rpc.channel import aio_channel
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.signing import Signer

PROMPT = "x" * 256

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


async def routable(address: str) -> list[serving_pb2.EngineStatus]:
    """The two engines of the proxy at this gRPC address, when it can use them.

    Raises:
        TimeoutError: it cannot.
    """
    await listening(address)
    async with asyncio.timeout(START_S), aio_channel(address) as channel:
        stub: serving_pb2_grpc.InferenceAsyncStub = serving_pb2_grpc.InferenceStub(channel)
        while True:
            engines = (await stub.GetTopology(serving_pb2.GetTopologyRequest())).engines
            if len(engines) == 2 and not any(engine.excluded_because for engine in engines):
                return list(engines)
            await asyncio.sleep(0.05)
