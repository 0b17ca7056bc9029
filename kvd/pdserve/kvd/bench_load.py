"""kvd under load: `python -m pdserve.kvd.bench --load`.

One daemon, a process of its own, and three parts through its engines' interface:

1. an open loop: transfers started at fixed times, whatever became of those before;
2. a closed loop: as many more as a bounded number in flight allows, up to the total;
3. fences: large transfers that are cancelled while their bytes are under way.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.kvd.bench_daemon import Books, Usage, books, usage
from pdserve.kvd.bench_fences import Broken, Fences, fences
from pdserve.kvd.bench_result import Result
from pdserve.kvd.bench_traffic import Traffic
from pdserve.kvd.limits import Limits
from pdserve.kvd.testing import kvd_process

_MIB: Final = 1 << 20
_P50_MS: Final = 3.0
_P99_MS: Final = 20.0
_GROWTH_MIB: Final = 8.0
"""Over 70,000 transfers 120 bytes each: less than the least that can be kept of one, a handle's text
and its place in a table."""
_FENCE: Final = "load: longest fence"
_FENCE_MS: Final = Limits().fence * 1e3
_REMEMBERED: Final = 8_192
"""kvd remembers so many transfers and handles that are over: full before the memory's first reading."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much of it."""

    rate: float = 500.0
    """Transfers a second in the open loop."""
    seconds: float = 60.0
    """Of the open loop."""
    total: int = 100_000
    """Transfers of both loops."""
    in_flight: int = 64
    """At most, in the closed loop."""
    fences: int = 200
    sample_every: int = 50
    """One in so many transfers has its bytes compared."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that leave nothing to measure."""
        if not 1 < self.at_rate < self.total or self.fences < 1:
            raise ValueError(f"{self.at_rate} transfers at a rate, of {self.total} in all, cannot be measured")

    @property
    def at_rate(self) -> int:
        """Transfers of the open loop."""
        return int(self.rate * self.seconds)

    @property
    def closed(self) -> int:
        """Transfers of the closed loop."""
        return self.total - self.at_rate


async def load(asked: Load) -> list[Result]:
    """Every part, one after the other. Where transfers do not end, the line about faults is the only one."""
    remembered = min(_REMEMBERED, max(1, asked.at_rate // 2))
    with tempfile.TemporaryDirectory(prefix="kvdload") as folder:
        async with kvd_process(Path(folder), "--max-remembered", str(remembered)) as kvd:
            pid = kvd.process.pid
            async with Traffic(kvd, total=asked.total, seed=asked.seed, sample_every=asked.sample_every) as traffic:
                start = _read(pid)
                try:
                    await traffic.at_rate(asked.at_rate, asked.rate)
                    await traffic.settle()
                    warm = _read(pid)
                    results = _control(traffic, asked.at_rate / (warm.at - start.at))
                    await traffic.in_flight(asked.closed, asked.in_flight)
                    await traffic.settle()
                except TimeoutError:  # what is missing is what there is to say
                    return [_nothing_lost(traffic, await books(kvd.socket))]
                end = _read(pid)
                seen = await books(kvd.socket)
            results.insert(0, _nothing_lost(traffic, seen))
            results.append(_memory(warm, end, asked.closed, remembered))
            results.append(_speed(warm, end, asked))
            results.append(_cpu(start, warm, end, asked))
            try:
                results.append(_fences(await fences(kvd, asked.fences, asked.seed)))
            except (Broken, TimeoutError) as error:
                results.append(_unmeasured(_FENCE, "ms", _FENCE_MS, f"{error}" or "an end did not come"))
            return results


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    """Monotonic seconds."""
    usage: Usage


def _read(pid: int) -> _Reading:
    return _Reading(time.monotonic(), usage(pid))


def _nothing_lost(traffic: Traffic, seen: Books) -> Result:
    """Ends too few or too many at the stubs and at kvd, wrong bytes, blocks not free, and defects."""
    tally, total = traffic.tally, traffic.total
    faults = {
        "ends missing": tally.missing,
        "ends heard twice": tally.repeated,
        "ends not good": tally.reasons.total(),
        "wrong bytes": traffic.wrong,
        "off at kvd": abs(total - seen.landed) + abs(total - seen.released) + seen.other_ends,
        "open at kvd": seen.open_ends,
        "blocks held": seen.blocks_held,
        "defects of kvd": seen.defects,
    }
    found = ", ".join(f"{name} {count}" for name, count in faults.items() if count)
    detail = (
        f"{total} transfers, at each side one end for scheduler and worker; kvd counts {seen.landed} landed, "
        f"{seen.released} released; {traffic.verified} compared byte for byte; all blocks free, books checked"
    )
    if tally.reasons:
        found += f" ({', '.join(f'{reason} {count}' for reason, count in tally.reasons.most_common())})"
    value = sum(faults.values())
    return Result("load: faults", value, "", 0, value == 0 and traffic.verified > 0, found or detail)


def _control(traffic: Traffic, reached: float) -> list[Result]:
    """kvd's own part of a hand-over, at the rate asked for."""
    took = sorted(traffic.control_ms)
    if not took:
        why = "no transfer landed"
        return [
            _unmeasured("load: control p50", "ms", _P50_MS, why),
            _unmeasured("load: control p99", "ms", _P99_MS, why),
        ]
    p50, p99 = statistics.median(took), _percentile(took, 0.99)
    late = sorted(traffic.late_ms)
    detail = (
        f"p90 {_percentile(took, 0.9):.2f} ms, worst {took[-1]:.1f} ms; {reached:.0f} transfers/s, "
        f"started late by p50 {statistics.median(late):.2f}, p99 {_percentile(late, 0.99):.2f} ms; "
        f"the copy itself {statistics.median(traffic.copy_ms):.2f} ms"
    )
    return [
        Result("load: control p50", p50, "ms", _P50_MS, p50 <= _P50_MS, detail),
        Result("load: control p99", p99, "ms", _P99_MS, p99 <= _P99_MS, f"{len(took)} transfers"),
    ]


def _memory(warm: _Reading, end: _Reading, transfers: int, remembered: int) -> Result:
    """How much the daemon's own memory grew while every table was full."""
    grown = end.usage.memory - warm.usage.memory
    detail = (
        f"from {warm.usage.memory / _MIB:.1f} to {end.usage.memory / _MIB:.1f} MiB over {transfers} transfers "
        f"({grown / transfers:+.0f} bytes each), {remembered} remembered"
    )
    return Result("load: memory growth", grown / _MIB, "MiB", _GROWTH_MIB, grown <= _GROWTH_MIB * _MIB, detail)


def _speed(warm: _Reading, end: _Reading, asked: Load) -> Result:
    took = end.at - warm.at
    detail = f"{asked.closed} transfers in {took:.1f} s, {asked.in_flight} in flight"
    return Result("load: speed", asked.closed / took, "transfers/s", None, True, detail)


def _cpu(start: _Reading, warm: _Reading, end: _Reading, asked: Load) -> Result:
    at_rate = (warm.usage.cpu - start.usage.cpu) / asked.at_rate * 1e3
    closed = (end.usage.cpu - warm.usage.cpu) / asked.closed * 1e3
    detail = f"of the daemon, a transfer, as fast as it goes; {at_rate:.2f} ms at {asked.rate:g} transfers/s"
    return Result("load: CPU", closed, "ms", None, True, detail)


def _fences(done: Fences) -> Result:
    """From cancel to the producer's end, with a copy in flight, against the longest wait for a fence."""
    worst = max(done.ms)
    seen = done.seen
    clean = not (seen.blocks_held or seen.open_ends or seen.defects)
    detail = f"p50 {statistics.median(done.ms):.2f} ms, {len(done.ms)} cancelled in flight, {done.too_late} too late"
    if not clean:
        detail += f"; left: {seen}"
    return Result(_FENCE, worst, "ms", _FENCE_MS, clean and worst <= _FENCE_MS, detail)


def _unmeasured(name: str, unit: str, target: float, why: str) -> Result:
    return Result(name, 0.0, unit, target, False, f"not measured: {why}")


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
