"""What the proxy costs: fake engines that answer at once, a real proxy, one client process.

    python -m pdserve.proxy.bench [--requests 400] [--tokens 16] [--face http|grpc|direct] [--mode read|write]

`direct` is the rig's floor: the client plays READ's two legs itself.

Prints, for each number of requests in flight: TTFT p50 and p99 (ms), requests and tokens per second,
and the CPU time that the proxy took per request (ms). Engines, proxy and client are a process each.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from grpc import aio as grpc_aio

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.api.serving.v1 import serving_pb2, serving_pb2_grpc
from pdserve.proxy.service import SERVICE
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.rpc.channel import aio_channel
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.signing import Signer

PROMPT = "x" * 256
LEVELS = (1, 8, 32, 128)

One = Callable[[], Awaitable[float]]
"""Runs a request; its TTFT in seconds."""


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


async def measure(one: One, in_flight: int, requests: int, tokens: int, proxy: int) -> str:
    """One line of the table."""
    left = iter(range(requests))
    ttfts: list[float] = []

    async def worker() -> None:
        for _ in left:
            ttfts.append(await one())

    cpu, begun = _cpu_seconds(proxy), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    wall = time.perf_counter() - begun
    spent = _cpu_seconds(proxy) - cpu
    ttfts.sort()
    p50, p99 = ttfts[len(ttfts) // 2] * 1e3, ttfts[len(ttfts) * 99 // 100] * 1e3
    rates = f"{requests / wall:7.0f} req/s {requests * tokens / wall:8.0f} tok/s"
    return f"{in_flight:4d} in flight  TTFT {p50:7.2f} / {p99:7.2f} ms  {rates}  {spent / requests * 1e3:6.2f} ms CPU"


async def client(args: argparse.Namespace, grpc: str, http: str, proxy: int) -> None:
    """Waits for the engines, then runs all levels."""
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(aio_channel(grpc))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        stub: serving_pb2_grpc.InferenceAsyncStub = serving_pb2_grpc.InferenceStub(channel)
        mode = common_pb2.TRANSFER_MODE_READ if args.mode == "read" else common_pb2.TRANSFER_MODE_WRITE
        request = serving_pb2.GenerateRequest(text=PROMPT, mode=mode)
        request.sampling.max_tokens = args.tokens
        body = {"prompt": PROMPT, "max_tokens": args.tokens, "stream": True, "pdserve": {"mode": args.mode}}

        async def over_grpc() -> float:
            begun, first = time.perf_counter(), 0.0
            async for event in stub.Generate(request):
                if not first and event.HasField("delta"):
                    first = time.perf_counter() - begun
            return first

        async def over_http() -> float:
            begun = time.perf_counter()
            async with session.post(f"http://{http}/v1/completions", json=body) as response:
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
            order.sampling.max_tokens = args.tokens
            order.source.transfer_id = transfer_id
            async for event in legs[1].Decode(order):
                if not first and event.HasField("tokens"):
                    first = time.perf_counter() - begun
            while await prefill.read() is not grpc_aio.EOF:
                pass
            return first

        one = {"http": over_http, "grpc": over_grpc, "direct": direct}[args.face]
        engines = await _routable(stub)
        targets = {engine.role: await stack.enter_async_context(aio_channel(engine.address)) for engine in engines}
        legs = (
            prefill_pb2_grpc.PrefillStub(targets[common_pb2.ENGINE_ROLE_PREFILL]),
            decode_pb2_grpc.DecodeStub(targets[common_pb2.ENGINE_ROLE_DECODE]),
        )
        await measure(one, 8, 100, args.tokens, proxy)
        for level in LEVELS:
            print(await measure(one, level, args.requests, args.tokens, proxy), flush=True)


async def run(args: argparse.Namespace) -> None:
    """Starts the processes, measures, ends them."""
    ports = [_free_port() for _ in range(3)]
    flags = [f"--{name}={port}" for name, port in zip(("grpc-port", "http-port", "ping-port"), ports, strict=True)]
    grpc, http, registration = (f"127.0.0.1:{port}" for port in ports)
    proxy = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdserve.proxy", *flags, "--log-level=error")
    fakes = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdserve.proxy.bench", "--engines", registration)
    try:
        print(f"{SERVICE} over {args.face}, {args.mode}, {args.tokens} tokens, {args.requests} requests a line")
        await _listening(grpc)
        await client(args, grpc, http, proxy.pid)
    finally:
        for process in (fakes, proxy):
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def _routable(stub: "serving_pb2_grpc.InferenceAsyncStub") -> list[serving_pb2.EngineStatus]:
    async with asyncio.timeout(20):
        while True:
            engines = (await stub.GetTopology(serving_pb2.GetTopologyRequest())).engines
            if len(engines) == 2 and not any(engine.excluded_because for engine in engines):
                return list(engines)
            await asyncio.sleep(0.05)


async def _listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--face", choices=("http", "grpc", "direct"), default="http")
    parser.add_argument("--mode", choices=("read", "write"), default="read")
    parser.add_argument("--engines", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(engines(args.engines) if args.engines else run(args))


if __name__ == "__main__":
    main()
