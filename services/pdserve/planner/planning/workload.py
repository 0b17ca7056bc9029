"""What is asked of a deployment, and how runs of it are drawn. Pure, seeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from pdserve.bench.workload.arrivals import like_vllm
from pdserve.bench.workload.asks import Ask
from pdserve.bench.workload.lengths import Span, draw
from pdserve.bench.workload.prompts import TRACE_BLOCK
from pdserve.planner.simulator import Job
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests."""

    times: tuple[float, ...]
    """When each was sent, seconds from 0, ascending."""
    jobs: tuple[Job, ...]
    """What it asked for."""
    file: str = ""
    """Where it was read from; empty: nowhere."""

    @property
    def rate(self) -> float:
        """Requests a second.

        Raises:
            ConfigError: all were sent at once, so that there is none.
        """
        if self.times[-1] <= self.times[0]:
            raise ConfigError("all requests of the trace have the same time: it has no rate")
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


@dataclass(frozen=True, slots=True)
class Run:
    """One run to simulate: the arguments of `simulate`."""

    jobs: tuple[Job, ...]
    arrivals: tuple[float, ...] | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many come: exactly one of `rate` and `concurrency`."""

    prompt: Span
    """Prompt tokens."""
    output: Span
    """Answer tokens."""
    hit_rate: float = 0.0
    """Share of each prompt that is found in the prefix cache of the engine that computes it."""
    rate: float | None = None
    """Requests a second, whatever becomes of them: open loop."""
    concurrency: int | None = None
    """Requests in flight: closed loop."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps between arrivals; 1 is Poisson."""
    trace: Trace | None = None
    """In place of lengths and hit rate; sent at `rate`, in its own pattern."""
    scale: float = field(default=1.0, kw_only=True)
    """Answers of the trace are so many times as long."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be."""
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError("a workload has either a rate or a number of requests in flight")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate:g} requests a second: it must be positive and finite")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"{self.concurrency} requests in flight: there must be at least one")
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"a hit rate of {self.hit_rate:g}: it must be from 0 to 1")
        if not self.burstiness > 0:
            raise ConfigError(f"a burstiness of {self.burstiness:g}: it must be positive")
        if self.trace is not None and not self.trace.jobs:
            raise ConfigError("the trace has no requests")
        if self.trace is not None and self.concurrency is not None:
            raise ConfigError("a trace says itself when requests come: it has no number of requests in flight")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        if self.trace is not None:
            return max(job.prompt + self._scaled(job.output) for job in self.trace.jobs)
        return self.prompt.high + self.output.high

    def stretch(self, room: int) -> float:
        """How many times as long answers may be, for each request to fit into `room` tokens with its prompt."""
        if self.trace is not None:
            return min((room - job.prompt) / (job.output * self.scale) for job in self.trace.jobs)
        return (room - self.prompt.high) / self.output.high

    @property
    def typical(self) -> Job:
        """A request of mean lengths."""
        if self.trace is not None:
            jobs = self.trace.jobs
            prompt, hit, output = (
                round(sum(values) / len(jobs))
                for values in zip(*((j.prompt, j.hit, j.output) for j in jobs), strict=True)
            )
            return Job(prompt, max(1, self._scaled(output)), hit)
        prompt = (self.prompt.low + self.prompt.high) // 2
        return Job(prompt, (self.output.low + self.output.high) // 2, int(prompt * self.hit_rate))

    def at(self, rate: float) -> Self:
        """The same requests at another rate."""
        return replace(self, rate=rate, concurrency=None)

    def lighter(self, factor: float) -> Self:
        """The same requests, fewer of them: `factor`, below 1, of the rate, or of those in flight."""
        if self.concurrency is not None:
            return replace(self, concurrency=max(1, int(self.concurrency * factor)))
        return replace(self, rate=(self.rate or 0.0) * factor)

    def with_output(self, factor: float) -> Self:
        """The same with answers that are so many times as long."""
        if self.trace is not None:
            return replace(self, scale=self.scale * factor)
        low, high = (max(1, round(length * factor)) for length in (self.output.low, self.output.high))
        return replace(self, output=Span(low, high))

    def run(self, count: int, seed: int) -> Run:
        """`count` requests; equal seeds give equal runs.

        Arrivals are those of `pdserve bench` for the same seed, so that a run can be measured as it was planned. A
        trace is cut or repeated to `count`; seed 0 takes it from its start, others from elsewhere.
        """
        rng = np.random.default_rng(seed)
        if self.trace is not None:
            return self._replayed(self.trace, count, rng if seed else None)
        asks = draw(self.prompt, self.output, count, rng)
        jobs = tuple(_job(ask, int((ask.prompt_tokens or 0) * self.hit_rate)) for ask in asks)
        if self.concurrency is not None:
            return Run(jobs, None, self.concurrency)
        return Run(jobs, tuple(like_vllm(self.rate or 0.0, self.burstiness, count, seed)), None)

    def _replayed(self, trace: Trace, count: int, rng: np.random.Generator | None) -> Run:
        """Turned like a wheel: the end of the trace is followed by its beginning, at its mean gap."""
        start = int(rng.integers(len(trace.jobs))) if rng is not None else 0
        size = len(trace.jobs)
        period = trace.times[-1] - trace.times[0] + 1.0 / trace.rate
        places = [(start + index) % size for index in range(count)]
        rounds = [(start + index) // size for index in range(count)]
        times = [trace.times[place] + turn * period for place, turn in zip(places, rounds, strict=True)]
        first = times[0]
        jobs = tuple(replace(trace.jobs[place], output=self._scaled(trace.jobs[place].output)) for place in places)
        shifted = [time - first for time in times]
        if self.rate is not None and count > 1 and shifted[-1] > 0:
            shifted = [time * trace.rate / self.rate for time in shifted]
        return Run(jobs, tuple(shifted), None)

    def _scaled(self, output: int) -> int:
        return max(1, round(output * self.scale))


def of_trace(times: Sequence[float], asks: Sequence[Ask], rate: float | None = None, file: str = "") -> Workload:
    """A recorded trace as `pdserve.bench.workload.files.read_trace` has it, from `file`; `rate` None: its own.

    What a prompt shares with earlier ones, from its beginning on, counts as found: a cache that forgets nothing and
    that all engines share.

    Raises:
        ConfigError: fewer than two requests, or all at once.
    """
    seen: set[int] = set()
    jobs = []
    for ask in asks:
        hit = 0
        for block in ask.blocks:
            if block not in seen:
                break
            hit += TRACE_BLOCK
        seen.update(ask.blocks)
        prompt = ask.prompt_tokens or 1
        jobs.append(_job(ask, min(hit, prompt)))
    if len(jobs) < 2:
        raise ConfigError("a trace of one request has no rate: give it at least two")
    trace = Trace(tuple(times), tuple(jobs), file)
    prompts, outputs = ([getattr(job, name) for job in jobs] for name in ("prompt", "output"))
    hits = sum(job.hit for job in jobs) / sum(prompts)
    return Workload(
        Span(min(prompts), max(prompts)),
        Span(min(outputs), max(outputs)),
        hits,
        rate=trace.rate if rate is None else rate,
        trace=trace,
    )


def _job(ask: Ask, hit: int) -> Job:
    return Job(ask.prompt_tokens or 1, ask.output_tokens, hit)
