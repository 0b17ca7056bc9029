"""GB/s of each transport over block size, for kvd.bench.

64 MiB in scattered blocks over two regions of 512 MiB, from `start` to the end of `wait` as the daemon's event loop
sees it, beside one contiguous memmove of as many bytes in the same regions and, for nixl, beside nixl used directly in
a process of its own (bench_nixl): one request, asked about without a pause, from the same serving process into the same
memory. Every way takes its turn in every repeat, with blocks of its own, so that none finds what another has brought
into the processor's cache; which of the two nixls is first alternates. Figures are medians. nixl reads from a serving
process of this host, so "tcp" is loopback.
"""

import asyncio
import contextlib
import ctypes
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdserve.kvd.bench_result import Result
from pdserve.kvd.bench_shape import scattered
from pdserve.kvd.config import NixlConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl import NixlTransport, check_installed
from pdserve.kvd.transport.nixl_process import environment
from pdserve.kvd.transport.port import MappedRegion, Session, Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError

_MIB: Final = 1 << 20
_REGION: Final = 512 * _MIB
_MOVED: Final = 64 * _MIB
_BLOCKS: Final = (16 << 10, 64 << 10, 256 << 10)
_DIRECT_S: Final = 30.0
"""Longest wait for a direct read."""
_OF_NIXL: Final = 0.9
"""Least share of the speed of nixl used directly."""
_LANES: Final = {"nixl": NixlConfig(), "nixl tcp": NixlConfig(tls="tcp")}


@dataclass(frozen=True, slots=True)
class _Way:
    """One transport, open, and nixl itself where it is nixl."""

    name: str
    session: Session
    direct: asyncio.subprocess.Process | None


async def transport_table(repeats: int, seed: int) -> list[Result]:
    """A line for each transport and block size."""
    arena = Arena()
    regions = [_region(arena, rank) for rank in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(arena.close)
        ways = [_Way("shm", await stack.enter_async_context(_open(ShmTransport(arena), regions)), None)]
        try:
            check_installed()
        except ConfigError as error:
            print(f"pdserve.kvd.bench: without nixl ({error.message})", file=sys.stderr)
        else:
            for name, config in _LANES.items():
                transport = NixlTransport(arena, config)
                session = await stack.enter_async_context(_open(transport, regions))
                card = await transport.card(regions[0])
                into = arena.file(regions[1].offset)
                ways.append(_Way(name, session, await stack.enter_async_context(_direct(into, config, card))))
        for way in ways:  # every process has touched every page before anything is measured
            await way.session.start(scattered(np.random.default_rng(seed), _REGION, _MIB, _REGION)).wait()
            if way.direct is not None:
                await _directly(way.direct, seed, _MIB, _REGION)
        return [result for block in _BLOCKS for result in await _measure(arena, regions, ways, block, repeats, seed)]


async def _measure(
    arena: Arena, regions: Sequence[MappedRegion], ways: Sequence[_Way], block: int, repeats: int, seed: int
) -> list[Result]:
    took: dict[str, list[float]] = defaultdict(list)
    lanes: dict[str, str] = {}
    seeds = itertools.count(seed)
    for repeat in range(-1, repeats):  # the first one warms up
        turn: dict[str, float] = {"memmove": _contiguous(arena, regions, np.random.default_rng(next(seeds)))}
        for way in ways:
            directly = f"{way.name} directly"
            if way.direct is not None and repeat % 2:
                turn[directly] = await _directly(way.direct, next(seeds), block, _MOVED)
            runs = scattered(np.random.default_rng(next(seeds)), _REGION, block, _MOVED)
            began = time.perf_counter()
            moved = await way.session.start(runs).wait()
            turn[way.name] = time.perf_counter() - began
            lanes[way.name] = moved.lanes
            if way.direct is not None and directly not in turn:
                turn[directly] = await _directly(way.direct, next(seeds), block, _MOVED)
        if repeat >= 0:
            for name, seconds in turn.items():
                took[name].append(seconds)
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    return [_result(way, block, median, lanes[way.name], repeats) for way in ways]


def _result(way: _Way, block: int, median: dict[str, float], lanes: str, repeats: int) -> Result:
    detail = f"{_speed(median[way.name])}, memmove {_speed(median['memmove'])}"
    name = f"{way.name} {block >> 10} KiB"
    if way.direct is None:
        share = median["memmove"] / median[way.name]
        return Result(name, share, "of memmove", None, True, f"{detail}, {repeats} repeats")
    directly = median[f"{way.name} directly"]
    share = directly / median[way.name]
    detail += f", nixl directly {_speed(directly)}, over {lanes}, {repeats} repeats"
    return Result(name, share, "of nixl", _OF_NIXL, share >= _OF_NIXL, detail)


def _speed(seconds: float) -> str:
    return f"{_MOVED / seconds / 1e9:.2f} GB/s"


@contextlib.asynccontextmanager
async def _open(transport: Transport, regions: Sequence[MappedRegion]) -> AsyncIterator[Session]:
    try:
        session = await transport.open(*regions)
        try:
            yield session
        finally:
            await session.close()
    finally:
        await transport.aclose()


@contextlib.asynccontextmanager
async def _direct(into: int, config: NixlConfig, card: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """`into`: the file of the region that it reads into."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.kvd.bench_nixl", str(into), str(_REGION), card.hex()),
        pass_fds=(into,),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**environment(config, os.environ), "UCX_PROTO_INFO": "n"},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), _DIRECT_S)


async def _directly(process: asyncio.subprocess.Process, seed: int, block: int, nbytes: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seed} {block} {nbytes}\n".encode())
    answer = await asyncio.wait_for(process.stdout.readline(), _DIRECT_S)
    if not answer:
        raise ConfigError(f"nixl used directly ended by itself ({await process.wait()})")
    return int(answer) / 1e9


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
    at = [arena.address(r.offset + int(random.integers(0, (_REGION - _MOVED) // 4096)) * 4096) for r in regions]
    began = time.perf_counter()
    ctypes.memmove(at[1], at[0], _MOVED)
    return time.perf_counter() - began
