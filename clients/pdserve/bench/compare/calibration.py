"""Measures one engine of the colocated pair, one request at a time, while the other decodes a full batch.

The proxy has no way to name an engine, but its rule is known: the least loaded engine, and of equally loaded ones the
one that was used longest ago. So 2 x batch equal long requests, sent one by one, go to the two engines in turn. Every
second one is cancelled, which leaves one engine with a full batch and the other empty. Whatever is sent then goes to
the empty one. That it was so is checked: by the engines' own counts before, and by each answer's engine after.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pdserve.bench.compare.objectives import Calibration, Sample, calibrated
from pdserve.bench.compare.settings import Settings
from pdserve.bench.workload.prompts import TokenRange
from pdserve.client import AsyncClient, Engine, Retry
from pdserve.rpc.errors import DeadlinePassed, PdserveError, Unavailable

T = TypeVar("T")
_POLL = 0.05
"""Seconds between two questions to the proxy."""
_MOST_RUNS = 1 << 20
"""Content seeds of the calibration lie beyond those of all repeats."""


class _Neighbour:
    """One long answer under way."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], tokens: int, timeout: float) -> None:
        self.chunks = 0
        self.task = asyncio.create_task(self._run(client, prompt, tokens, timeout), name="neighbour")

    async def _run(self, client: AsyncClient, prompt: Sequence[int], tokens: int, timeout: float) -> None:
        stream = client.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0, timeout=timeout)
        async with stream:
            async for delta in stream:
                self.chunks += bool(delta.token_ids)

    def check(self) -> None:
        """Raises what ended it, if it has ended."""
        if self.task.done():
            self.task.result()
            raise Unavailable("a neighbour's answer ended before the calibration did: --calibration fewer requests")


async def calibrate(target: str, settings: Settings, timeout: float, say: Callable[[str], None]) -> Calibration:
    """What the objectives are made of.

    Args:
        target: the proxy of a colocated pair that does nothing else.
        settings: lengths, batch, how many requests.
        timeout: seconds of each step: to fill the neighbour, and of one request.
        say: told what is being done.

    Raises:
        PdserveError: a request failed, or the neighbour did not stay full and alone.
        DeadlinePassed: a step took longer than `timeout`.
    """
    serials = itertools.count()

    def prompt() -> list[int]:
        return _prompt(settings.input_len, settings.seed, next(serials))

    async with AsyncClient(target, timeout=timeout, retry=Retry(attempts=1)) as client:
        neighbours: list[_Neighbour] = []
        try:
            busy = await _within(
                timeout, _fill(client, settings, prompt, neighbours, timeout * 10), "fill the neighbour"
            )
            say(f"engine {busy[:8]} decodes {settings.batch} answers; the other one is asked, one request at a time")
            samples: list[Sample] = []
            for number in range(settings.calibration + 1):
                engine, sample = await _within(timeout, _one(client, prompt(), settings.output_len), "answer")
                for neighbour in neighbours:
                    neighbour.check()
                if engine == busy:
                    raise PdserveError("a calibration request went to the busy engine: the calibration is void")
                if number:  # the first one warms the engine up
                    samples.append(sample)
                    gap = max(sample.itls, default=0.0)
                    say(f"request {number}: TTFT {sample.ttft:.3f} s, longest gap {gap:.3f} s")
        finally:
            await _end(neighbours)
    return calibrated(samples, settings.batch)


async def _fill(
    client: AsyncClient,
    settings: Settings,
    prompt: Callable[[], list[int]],
    neighbours: list[_Neighbour],
    timeout: float,
) -> str:
    """Leaves one engine with a full batch in `neighbours` and the other with nothing; the busy one's id."""
    extra: list[_Neighbour] = []
    try:
        for number in range(2 * settings.batch):
            # The next one only when this one has its engine: the order is what sends every second one elsewhere.
            one = _Neighbour(client, prompt(), settings.neighbour_tokens, timeout)
            (extra if number % 2 else neighbours).append(one)
            while (await client.topology()).in_flight <= number:
                one.check()
                await asyncio.sleep(_POLL)
    finally:
        await _end(extra)
    while True:
        for neighbour in neighbours:
            neighbour.check()
        busy = _busy((await client.topology()).engines, settings.batch)
        if busy and all(neighbour.chunks for neighbour in neighbours):
            return busy
        await asyncio.sleep(_POLL)


def _busy(engines: Sequence[Engine], batch: int) -> str:
    """The engine that runs the whole batch, where the others have nothing; else empty."""
    full = [engine for engine in engines if engine.running == batch and not engine.waiting]
    idle = [engine for engine in engines if not engine.running and not engine.waiting]
    return full[0].engine_id if len(full) == 1 and len(full) + len(idle) == len(engines) else ""


async def _one(client: AsyncClient, prompt: Sequence[int], tokens: int) -> tuple[str, Sample]:
    """Which engine answered, and how it looked from here.

    Raises:
        PdserveError: it failed, or had no token.
    """
    loop = asyncio.get_running_loop()
    chunks: list[float] = []
    stream = client.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0)
    async with stream:
        sent = loop.time()
        async for delta in stream:
            if delta.token_ids:
                chunks.append(loop.time())
        done = await stream.completion()
    if not chunks:
        raise PdserveError("a calibration request was answered without a token", reason="NO_TOKEN")
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(chunks))
    return done.decode_engine_id, Sample(chunks[0] - sent, gaps)


async def _within(seconds: float, work: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlinePassed(f"calibration: did not {what} within {seconds:g} s") from None


async def _end(neighbours: Sequence[_Neighbour]) -> None:
    for neighbour in neighbours:
        neighbour.task.cancel()
    await asyncio.gather(*(neighbour.task for neighbour in neighbours), return_exceptions=True)


def _prompt(length: int, seed: int, serial: int) -> list[int]:
    """Tokens that no other request has."""
    import numpy as np

    ids = TokenRange()
    rng = np.random.default_rng([seed, _MOST_RUNS, serial])
    tokens: list[int] = rng.integers(ids.low, ids.high + 1, length).tolist()
    return tokens
