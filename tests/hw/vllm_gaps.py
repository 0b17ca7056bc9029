"""Decode's time between tokens while prompts are handed over back to back, by each way to copy.

`STREAMS` requests decode in one engine. Beside them, `LOOPS` at a time, a prompt of `PROMPT` tokens is handed over to
`CONSUMERS` requests again and again: prefill has it in its prefix cache and computes a few tokens of it, each consumer
takes all of it and computes one. First as fast as it goes, then `PACED` prompts a second, which each way to copy can
keep up with. A daemon that copies nothing shows what these requests cost by themselves; what a way to copy costs is the
difference.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from pdserve.engine.port import Request, Sampling
from pdserve.engine.vllm.testing_pair import FIRST, GREEDY, Prompt, ask
from pdserve.kvd.config import GpuCopy
from pdserve.kvd.types import Mode
from tests.hw.vllm_rig import Rig

STREAMS: Final = 16
CONTEXT: Final = 512
PROMPT: Final = 4_000
LOOPS: Final = 4
CONSUMERS: Final = 4
PACED: Final = 4
_ENDLESS: Final = replace(GREEDY, max_tokens=8_000)
_READY_S: Final = 30.0

_HEAD: Final = (
    "| copies by | p50 | p99 | longest | gaps | copies a second | one copy | prefill to the last consumer |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Streams:
    """Requests that decode until they are ended."""

    def __init__(self, rig: Rig, source: random.Random) -> None:
        self._times: list[list[float]] = [[] for _ in range(STREAMS)]
        self._tasks = [
            asyncio.create_task(self._run(rig, tuple(source.randrange(256) for _ in range(CONTEXT)), times, _ENDLESS))
            for times in self._times
        ]

    async def ready(self) -> None:
        """Returns when each has its tenth token."""
        async with asyncio.timeout(_READY_S):
            while min(map(len, self._times)) < 10:
                self._check()
                await asyncio.sleep(0.01)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds from token to token of all of them, of those in a span of time."""
        self._check()
        return [
            later - earlier
            for times in self._times
            for earlier, later in pairwise(times)
            if begin <= earlier and later <= end
        ]

    async def end(self) -> None:
        """Aborts them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"a stream has ended: {task.exception()}")

    async def _run(self, rig: Rig, prompt: Prompt, times: list[float], sampling: Sampling) -> None:
        request = Request(f"stream-{id(times)}", prompt, sampling)
        async with contextlib.aclosing(rig.pair.decode.generate(request)) as outputs:
            async for output in outputs:
                if output.token_ids:
                    times.append(time.perf_counter())


class Transfers:
    """One prompt, handed over again and again."""

    def __init__(self, rig: Rig, prompt: Prompt) -> None:
        self._rig = rig
        self._prompt = prompt
        self._stop = asyncio.Event()
        self.copies: list[float] = []
        """Milliseconds that kvd copied, of each."""
        self.whole: list[float] = []
        """Milliseconds, of each prompt with all of its consumers."""

    async def beside(self, seconds: float) -> None:
        """Runs them for so long."""
        loops = [asyncio.create_task(self._loop()) for _ in range(LOOPS)]
        await asyncio.sleep(seconds)
        self._stop.set()
        await asyncio.gather(*loops)

    async def paced(self, seconds: float) -> None:
        """Runs `PACED` of them a second for so long, whether or not those before are over."""
        running = []
        for _ in range(round(PACED * seconds)):
            running.append(asyncio.create_task(self._once()))
            await asyncio.sleep(1 / PACED)
        await asyncio.gather(*running)

    async def _loop(self) -> None:
        while not self._stop.is_set():
            await self._once()

    async def _once(self) -> None:
        pair, began = self._rig.pair, time.perf_counter()
        produce = pair.produce(Mode.READ, CONSUMERS)
        produced = await ask(pair.prefill, self._prompt, FIRST, produce)
        takers = [pair.consume(produce, produced.last, consumer) for consumer in range(CONSUMERS)]
        await asyncio.gather(*(ask(pair.decode, self._prompt, FIRST, taker) for taker in takers))
        self.whole.append((time.perf_counter() - began) * 1e3)
        for consumer in range(CONSUMERS):
            end = await pair.end(pair.decode, produce.transfer_id, consumer)
            self.copies.append(end.facts.copy_ns / 1e6)


async def measure(rig: Rig, seconds: float, source: random.Random, nothing: str) -> None:
    """Prints the table. `nothing`: the module of a daemon that copies nothing."""
    prompt = tuple(source.randrange(256) for _ in range(PROMPT))
    await ask(rig.pair.prefill, prompt, FIRST)  # into the prefix cache
    print(f"\n{STREAMS} streams decode; {LOOPS} loops hand {PROMPT:,} tokens over to {CONSUMERS}", flush=True)
    print(_HEAD, flush=True)
    kernel, copying = ("--gpu-copy", GpuCopy.KERNEL.value), ("--gpu-copy", GpuCopy.ENGINES.value)
    ways = (("nothing", nothing, ()), ("kernel", "pdserve.kvd", kernel), ("engines", "pdserve.kvd", copying))
    for name, module, flags in ways:
        async with rig.other_kvd(*flags, module=module):
            streams = Streams(rig, source)
            try:
                await streams.ready()
                began = time.perf_counter()
                await asyncio.sleep(seconds)
                print(_line(f"no hand-overs ({name})", streams.gaps(began, time.perf_counter())), flush=True)
                for how in ("back to back", f"{PACED} a second"):
                    transfers, began = Transfers(rig, prompt), time.perf_counter()
                    await (transfers.paced if how[0].isdigit() else transfers.beside)(seconds)
                    took = time.perf_counter() - began
                    print(_line(f"{name}, {how}", streams.gaps(began, began + took), transfers, took), flush=True)
            finally:
                await streams.end()
            await rig.pair.idle()


def _line(name: str, gaps: Sequence[float], transfers: Transfers | None = None, seconds: float = 1.0) -> str:
    took = sorted(gap * 1e3 for gap in gaps)
    cells = [name, f"{statistics.median(took):.2f} ms", f"{took[int(len(took) * 0.99)]:.2f} ms", f"{took[-1]:.2f} ms"]
    cells.append(str(len(took)))
    if transfers is None:
        cells += ["", "", ""]
    else:
        cells.append(f"{len(transfers.copies) / seconds:.0f}")
        cells += [f"{statistics.median(column):.2f} ms" for column in (transfers.copies, transfers.whole)]
    return f"| {' | '.join(cells)} |"
