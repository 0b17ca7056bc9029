"""What kvd itself costs: `python -m pdserve.kvd.bench`.

(1) copy: 64 MiB in scattered blocks over 512 MiB of shared memory, through the daemon's own plan,
    session and copy thread, against one contiguous memmove of as many bytes from and to random
    places of the same two mappings. Repeats are interleaved; the ratio is of medians.
(2) empty transfer: from the producer's offer to the consumer hearing LANDED, one block of 4 KiB,
    through gRPC, a daemon in its own process, and its copy thread.
(3) where vLLM is installed, what the connector costs a running engine: engine.vllm.bench, as a
    process of its own.
(4) --load, alone: the daemon under load, see bench_load.
(5) transports: GB/s of each over block size, nixl beside nixl used directly, see bench_transports;
    alone with --transports.
(6) --transport gpu_ipc, alone: device memory of another process, see bench_gpu.
"""

import argparse
import asyncio
import ctypes
import gc
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pdserve.kvd.bench_load import Load, load
from pdserve.kvd.bench_result import Result, line
from pdserve.kvd.bench_transports import transport_table
from pdserve.kvd.client import Accept, Offer
from pdserve.kvd.plan import make_plan
from pdserve.kvd.testing import FakeEngine, kvd_process, plain_layout
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import MemoryKind, Mode, RegionKey
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.log import LogLevel, setup

__all__ = ["Result", "line"]  # engine.vllm.bench prints the same lines

_MIB = 1 << 20
_REGION = 512 * _MIB
_MOVED = 64 * _MIB
_SWITCH_INTERVAL_S = 0.0005
"""As the daemon sets it."""
_ENGINE_S = 900.0
"""Longest wait for (3)."""
_STOP_S = 60.0
"""Longest wait for its end, once it was told."""


async def copy_ratio(block_bytes: int, repeats: int, seed: int, target: float) -> Result:
    """Speed of scattered blocks of this size over that of one contiguous copy."""
    arena = Arena()
    random = np.random.default_rng(seed)
    regions = [_region(arena, rank) for rank in range(2)]
    transport = ShmTransport(arena)
    session = await transport.open(*regions)
    layout = plain_layout(_REGION // block_bytes, layers=1, block_bytes=block_bytes)
    count = _MOVED // block_bytes
    scattered: list[float] = []
    whole: list[float] = []
    planning: list[float] = []
    for _ in range(repeats):
        src, dst = (random.permutation(layout.num_blocks)[:count].tolist() for _ in range(2))
        began = time.perf_counter()
        runs = make_plan(layout, layout, [0], src, dst)
        planning.append(time.perf_counter() - began)
        moved = await session.start(runs).wait()
        scattered.append(moved.ns / 1e9)
        whole.append(_contiguous(arena, regions, random))
    await session.close()
    await transport.aclose()
    arena.close()
    fast, slow = statistics.median(whole), statistics.median(scattered)
    detail = (
        f"scattered {slow * 1e3:.1f} ms ({_MOVED / slow / 1e9:.1f} GB/s), contiguous {fast * 1e3:.1f} ms "
        f"({_MOVED / fast / 1e9:.1f} GB/s), plan {statistics.median(planning) * 1e3:.2f} ms, {repeats} repeats"
    )
    ratio = fast / slow
    return Result(f"copy {block_bytes >> 10} KiB blocks", ratio, "of memmove", target, ratio >= target, detail)


def _region(arena: Arena, rank: int) -> MappedRegion:
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, _REGION)
        offset = arena.map(fd, _REGION)
    finally:
        os.close(fd)
    view = arena.view(offset, _REGION)
    view[:] = bytes(_REGION)  # every page is there before anything is measured
    view.release()
    return MappedRegion(RegionKey("bench", rank), MemoryKind.HOST, _REGION, offset)


def _contiguous(arena: Arena, regions: Sequence[MappedRegion], random: np.random.Generator) -> float:
    views = []
    for region in regions:
        start = region.offset + int(random.integers(0, (_REGION - _MOVED) // 4096)) * 4096
        views.append(arena.view(start, _MOVED))
    src, dst = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views)
    began = time.perf_counter()
    ctypes.memmove(dst, src, _MOVED)
    took = time.perf_counter() - began
    for view in views:
        view.release()
    return took


async def empty_transfer(count: int, target_ms: float) -> Result:
    """Milliseconds from offer to LANDED, at the median."""
    took: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvdbench") as folder:
        async with (
            kvd_process(Path(folder)) as kvd,
            FakeEngine(kvd, seed=1) as p,
            FakeEngine(kvd, seed=2) as d,
        ):
            for number in range(count):
                tid = os.urandom(16)
                d.scheduler.send(Accept(f"d{number}", tid, 0, (1,), 0, ticket=p.ticket(tid)))
                await asyncio.sleep(0.002)
                began = time.perf_counter()
                p.scheduler.send(Offer(f"p{number}", tid, 0, (1,), 16, Mode.READ))
                await d.end_of(f"d{number}")
                took.append((time.perf_counter() - began) * 1e3)
                await p.end_of(f"p{number}")
    p50, p99 = statistics.median(took), sorted(took)[int(len(took) * 0.99)]
    detail = f"p99 {p99:.2f} ms, best {min(took):.2f} ms, {count} transfers"
    return Result("empty transfer", p50, "ms p50", target_ms, p50 <= target_ms, detail)


async def run(repeats: int, transfers: int, seed: int) -> list[Result]:
    """Every measurement, one after the other."""
    return [
        await copy_ratio(16 << 10, repeats, seed, target=0.7),
        await copy_ratio(64 << 10, repeats, seed, target=0.9),
        await empty_transfer(transfers, target_ms=2.0),
        *await transport_table(repeats, seed),
    ]


def engine_part(seed: int, *, as_json: bool) -> int:
    """Runs (3), whose output is ours; its exit status: 1 where a target is missed."""
    command = [sys.executable, "-m", "pdserve.engine.vllm.bench", "--strict", "--seed", str(seed)]
    sys.stdout.flush()
    process = subprocess.Popen([*command, *(["--json"] if as_json else [])])
    try:
        return process.wait(_ENGINE_S)
    except subprocess.TimeoutExpired:
        print(f"pdserve.kvd.bench: the engine's part took longer than {_ENGINE_S:g} s", file=sys.stderr)
        process.send_signal(signal.SIGINT)  # unlike a kill, this lets it end the engines
        process.wait(_STOP_S)
        return 2
    finally:
        process.kill()  # nothing, once it has been waited for


def _print(results: Sequence[Result], *, as_json: bool) -> int:
    for one in results:
        print(line(one, as_json=as_json))
    return 0 if all(one.met for one in results) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 where a target is missed, 2 where the engine's part could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.kvd.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=31, help="of each copy (31)")
    parser.add_argument("--transfers", type=int, default=300, help="empty ones (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the blocks chosen (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        help="(3) alone, or not at all; without a word all of it, (3) where vLLM is installed",
    )
    parser.add_argument("--load", action="store_true", help="(4) alone: some three minutes")
    sizes = Load()
    parser.add_argument(
        "--load-rate", type=float, default=sizes.rate, help=f"transfers a second, at fixed times ({sizes.rate:g})"
    )
    parser.add_argument("--load-seconds", type=float, default=sizes.seconds, help=f"of that rate ({sizes.seconds:g})")
    parser.add_argument(
        "--load-total", type=int, default=sizes.total, help=f"the rest of them as fast as it goes ({sizes.total})"
    )
    parser.add_argument("--transport", choices=["gpu_ipc"], help="(6) alone; needs a CUDA or ROCm device")
    parser.add_argument("--across", action="store_true", help="(6) from one device to a second one")
    parser.add_argument("--transports", action="store_true", help="(5) alone")
    args = parser.parse_args(argv)
    if args.across and args.transport is None:
        parser.error("--across goes with --transport gpu_ipc")
    if args.transport is not None:
        from pdserve.kvd.bench_gpu import measure  # what only this needs

        try:
            return _print(asyncio.run(measure(args.repeats, args.seed, across=args.across)), as_json=args.json)
        except ConfigError as error:
            print(f"pdserve.kvd.bench: {error.message}", file=sys.stderr)
            return 2
    if args.load:
        if args.engine is not None:
            parser.error("--load is a run of its own")
        setup("bench", level=LogLevel.WARNING)
        try:
            asked = Load(rate=args.load_rate, seconds=args.load_seconds, total=args.load_total, seed=args.seed)
        except ValueError as error:
            parser.error(str(error))
        gc.freeze()  # a long pause of the stubs' collector would be counted as kvd's
        return _print(asyncio.run(load(asked)), as_json=args.json)
    vllm = importlib.util.find_spec("vllm") is not None
    if args.engine and not vllm:
        parser.error("--engine needs vLLM, of the extra `cpu`")
    if args.engine:
        return engine_part(args.seed, as_json=args.json)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    setup("bench", level=LogLevel.WARNING)
    if args.transports:
        return _print(asyncio.run(transport_table(args.repeats, args.seed)), as_json=args.json)
    results = asyncio.run(run(args.repeats, args.transfers, args.seed))
    status = _print(results, as_json=args.json)
    if args.engine is None and vllm:
        status = max(status, engine_part(args.seed, as_json=args.json))
    return status


if __name__ == "__main__":
    sys.exit(main())
