"""What the proxy costs: fake engines that answer at once, a real proxy, one client process.

    python -m pdserve.proxy.bench [--requests 400] [--tokens 16] [--face http|grpc|direct] [--mode read|write]
    python -m pdserve.proxy.bench --tracing [--pairs 5] [--seconds 10]

`direct` is the rig's floor: the client plays READ's two legs itself.

Prints, for each number of requests in flight: TTFT p50 and p99 (ms), requests and tokens per second,
and the CPU time that the proxy took per request (ms). Engines, proxy and client are a process each.

`--tracing` prints what tracing adds to TTFT at half the load that the machine can bear, in pairs of runs with
and without it, with kvd and simulated engines; docs/benchmarks.md says how. Exits with 1 where that is more than
it may be.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict

from pdserve.proxy import bench_tracing
from pdserve.proxy.bench_collector import collector
from pdserve.proxy.bench_processes import cpu_seconds
from pdserve.proxy.bench_rig import Ask, One, asking, engines, standing
from pdserve.proxy.service import SERVICE

LEVELS = (1, 8, 32, 128)


async def measure(one: One, in_flight: int, requests: int, tokens: int, proxy: int) -> str:
    """One line of the table."""
    left = iter(range(requests))
    ttfts: list[float] = []

    async def worker() -> None:
        for _ in left:
            ttfts.append(await one())

    cpu, begun = cpu_seconds(proxy), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    wall = time.perf_counter() - begun
    spent = cpu_seconds(proxy) - cpu
    ttfts.sort()
    p50, p99 = ttfts[len(ttfts) // 2] * 1e3, ttfts[len(ttfts) * 99 // 100] * 1e3
    rates = f"{requests / wall:7.0f} req/s {requests * tokens / wall:8.0f} tok/s"
    return f"{in_flight:4d} in flight  TTFT {p50:7.2f} / {p99:7.2f} ms  {rates}  {spent / requests * 1e3:6.2f} ms CPU"


async def table(ask: Ask, requests: int) -> None:
    """All levels."""
    print(f"{SERVICE} over {ask.face}, {ask.mode}, {ask.tokens} tokens, {requests} requests a line")
    async with standing() as at, asking(at, ask) as one:
        await measure(one, 8, 100, ask.tokens, at.pid)
        for level in LEVELS:
            print(await measure(one, level, requests, ask.tokens, at.pid), flush=True)


async def tracing(ask: Ask, pairs: int, seconds: float, *, as_json: bool) -> bool:
    """What tracing costs; whether that is as little as it should be."""
    said = sys.stderr if as_json else sys.stdout
    results = await bench_tracing.run(ask, pairs, seconds, lambda line: print(line, file=said, flush=True))
    for result in results:
        print(json.dumps(asdict(result)) if as_json else bench_tracing.line(result), flush=True)
    return all(result.met for result in results)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--face", choices=("http", "grpc", "direct"), default="http")
    parser.add_argument("--mode", choices=("read", "write"), default="read")
    parser.add_argument("--tracing", action="store_true", help="measure what tracing costs")
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without tracing; default 5")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each such run; default 10")
    parser.add_argument("--json", action="store_true", help="with --tracing: one object a line")
    parser.add_argument("--engines", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--collector", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engines:
        asyncio.run(engines(args.engines))
    elif args.collector:
        asyncio.run(collector(args.collector))
    ask = Ask(args.face, args.mode, args.tokens)
    if not args.tracing:
        asyncio.run(table(ask, args.requests))
        return 0
    if args.face == "direct" or args.pairs < 1 or args.seconds <= 0:
        parser.error("--tracing needs a face of the proxy, at least one pair, and some seconds")
    return 0 if asyncio.run(tracing(ask, args.pairs, args.seconds, as_json=args.json)) else 1


if __name__ == "__main__":
    sys.exit(main())
