"""What tracing adds to a request's TTFT: pairs of runs at half of what the machine can bear, with and without it.

Each pair has two deployments of its own (bench_fleet.py), since two processes of one program differ for all their life.
They stand side by side and take turns with the load: a machine that becomes slower does so for both. The load is an
open loop: requests start at fixed times, whatever became of those before.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from pdserve.proxy.bench_collector import collecting, traces
from pdserve.proxy.bench_fleet import DECODE_MS, PREFILL_MS, fleet
from pdserve.proxy.bench_processes import children, cpu_seconds
from pdserve.proxy.bench_rig import Ask, One, Standing, asking
from pdserve.rpc.errors import Unavailable

GROWTH_TARGET: Final = 3.0
"""Percent of the TTFT without tracing, at most."""
ADDED_TARGET: Final = 0.2
"""Milliseconds; it is enough to meet one of the two."""
_LEVELS: Final = (8, 32, 64)
"""Requests in flight among which the most that the machine can bear is looked for."""
_WARM: Final = 200
"""First requests of a proxy's life, which do not count."""
_FEWEST: Final = 300
"""Requests of a run; it is made longer where its seconds have not as many."""
_TURN_S: Final = 1.0
"""How long one side of a pair has the load before the other gets it."""
_TAIL_S: Final = 30.0
"""Longest wait for what is still in flight when the last request of a run has been started."""


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement against its target; `target` None: a number to know, without one."""

    name: str
    value: float
    unit: str
    target: float | None
    met: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    p50: float
    """Seconds, as the others."""
    p99: float
    late: float
    """How much later than it should have the client started requests, the p99."""
    cpu: float
    """Of the proxy, for one request."""
    apart: float
    """Of the process that draws and sends its traces, for one request."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs in turns."""

    on: Run
    off: Run


async def run(ask: Ask, pairs: int, seconds: float, say: Callable[[str], None]) -> list[Result]:
    """Measures.

    Raises:
        Unavailable: the load was not borne, or not all traces were sent.
        TimeoutError: the services did not start.
        ExceptionGroup: a request failed.
    """
    say(f"simulated engines: {PREFILL_MS:g} ms a step of prefill, {DECODE_MS:g} ms a step of decode")
    most = await saturation(ask, seconds)
    rate = most / 2
    say(f"{ask.face}, {ask.mode}, {ask.tokens} tokens: saturated at {most:.0f} requests/s, measured at {rate:.0f}")
    found: list[Pair] = []
    for number in range(pairs):
        found.append(await _pair(ask, rate, seconds, on_first=bool(number % 2)))
        on, off = (one.p50 * 1e3 for one in (found[-1].on, found[-1].off))
        say(f"pair {number + 1}: TTFT p50 {on:.3f} ms on, {off:.3f} ms off")
    return results(found)


def results(pairs: Sequence[Pair]) -> list[Result]:
    """Medians of both sides, and what lies between them."""
    on, off = (median(values) * 1e3 for values in ([p.on.p50 for p in pairs], [p.off.p50 for p in pairs]))
    added = on - off
    growth = added / off * 100
    met = growth <= GROWTH_TARGET or added <= ADDED_TARGET
    slow_on, slow_off = (median(values) * 1e3 for values in ([p.on.p99 for p in pairs], [p.off.p99 for p in pairs]))
    cpu_on, cpu_off = (median(values) * 1e3 for values in ([p.on.cpu for p in pairs], [p.off.cpu for p in pairs]))
    apart = median(p.on.apart for p in pairs) * 1e3
    each = ", ".join(f"{(pair.on.p50 - pair.off.p50) * 1e3:+.3f}" for pair in pairs)
    late = max(run.late for pair in pairs for run in (pair.on, pair.off)) * 1e3
    detail = f"{added:+.3f} ms (or at most {ADDED_TARGET} ms); by pairs: {each}; started late by {late:.1f} ms at p99"
    return [
        Result("tracing: TTFT off", off, "ms", None, True, f"median of {len(pairs)} runs' p50"),
        Result("tracing: TTFT on", on, "ms", None, True, "the same"),
        Result("tracing: TTFT p99", slow_on - slow_off, "ms", None, True, f"{slow_on:.2f} on, {slow_off:.2f} off"),
        Result("tracing: CPU", cpu_on - cpu_off, "ms/request", None, True, f"{cpu_on:.2f} on, {cpu_off:.2f} off"),
        Result("tracing: CPU apart", apart, "ms/request", None, True, "of the process that draws and sends"),
        Result("tracing: growth", growth, "% of TTFT", GROWTH_TARGET, met, detail),
    ]


def line(result: Result) -> str:
    """How a result is printed: as those of the other benchmarks."""
    verdict = f"{'no target':18}"
    if result.target is not None:
        verdict = f"target {result.target:<4} {'met' if result.met else 'MISSED':6}"
    return f"{result.name:22} {result.value:6.2f} {result.unit:11} {verdict}  {result.detail}"


async def saturation(ask: Ask, seconds: float) -> float:
    """Requests a second that are answered while always as many are in flight as serves the machine best."""
    async with fleet({}) as at, asking(at, ask) as one:
        await _closed(one, 8, _WARM)
        best = 0.0
        for in_flight in _LEVELS:
            best = max(best, await _for(one, in_flight, seconds / len(_LEVELS)))
    return best


@dataclass(slots=True)
class _Side:
    """One deployment of a pair, and what was measured of it so far."""

    at: Standing
    one: One
    ttfts: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    cpu: float = 0.0
    apart: float = 0.0

    def run(self) -> Run:
        """All its turns."""
        late, ttfts = sorted(self.late), sorted(self.ttfts)
        p99 = len(ttfts) * 99 // 100
        return Run(median(ttfts), ttfts[p99], late[p99], self.cpu / len(ttfts), self.apart / len(ttfts))


async def _pair(ask: Ask, rate: float, seconds: float, *, on_first: bool) -> Pair:
    turns = math.ceil(max(seconds, _FEWEST / rate) / _TURN_S)
    async with (
        collecting() as collector,
        fleet({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}"}) as traced,
        fleet({}) as plain,
        asking(traced, ask) as ask_traced,
        asking(plain, ask) as ask_plain,
    ):
        on, off = _Side(traced, ask_traced), _Side(plain, ask_plain)
        for side in (on, off):
            await _closed(side.one, 8, _WARM)
        for turn in range(turns):
            for side in (on, off) if on_first ^ bool(turn % 2) else (off, on):
                await _open(side, rate)
        await _arrived(collector, _WARM + len(on.ttfts))
    return Pair(on.run(), off.run())


async def _arrived(collector: str, requests: int) -> None:
    """Every request's trace has come.

    Raises:
        Unavailable: not all have, and more than a little later.
    """
    until = time.perf_counter() + _TAIL_S
    while (came := await traces(collector)) != requests:
        if came > requests or time.perf_counter() > until:
            raise Unavailable(f"{requests} requests were traced, and {came} traces came")
        await asyncio.sleep(0.1)


async def _closed(one: One, in_flight: int, requests: int) -> None:
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())


async def _for(one: One, in_flight: int, seconds: float) -> float:
    begun, done = time.perf_counter(), 0

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() - begun < seconds:
            await one()
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())
    return done / (time.perf_counter() - begun)


async def _open(side: _Side, rate: float) -> None:
    tasks: list[asyncio.Task[float]] = []
    others = children(side.at.pid)
    cpu, apart, begun = cpu_seconds(side.at.pid), sum(map(cpu_seconds, others)), time.perf_counter()
    try:
        async with asyncio.timeout(_TURN_S + _TAIL_S), asyncio.TaskGroup() as group:
            for number in range(max(1, round(rate * _TURN_S))):
                due = begun + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                side.late.append(time.perf_counter() - due)
                tasks.append(group.create_task(side.one()))
    except TimeoutError:
        raise Unavailable(f"{rate:.0f} requests/s are not borne: {_TAIL_S:g} s later some are still open") from None
    side.cpu += cpu_seconds(side.at.pid) - cpu
    side.apart += sum(map(cpu_seconds, others)) - apart
    side.ttfts += [task.result() for task in tasks]
