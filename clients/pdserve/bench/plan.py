"""A measurement before it begins: what is sent at which loads, and how it is judged. Pure; files are read by `make`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdserve.bench.goodput import THRESHOLD, Search, check_threshold
from pdserve.bench.results import Workload
from pdserve.bench.slo import Slo
from pdserve.bench.workload import arrivals
from pdserve.bench.workload.asks import Ask
from pdserve.bench.workload.files import CountTokens, read_dataset, read_trace
from pdserve.bench.workload.lengths import Span, draw
from pdserve.bench.workload.prompts import Prompts, Sharing, TokenRange
from pdserve.bench.workload.scenarios import SCENARIOS
from pdserve.rpc.errors import ConfigError, ContextExceeded

Kind = Literal["like_vllm", "poisson", "gamma"]
REQUESTS = 100
"""Of a run, where nothing else is said."""

_LENGTHS, _ARRIVALS = 1, 2
"""Streams of one seed: other arrivals leave the lengths as they are."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for; at most one of scenario, prompt with output, dataset, and trace."""

    scenario: str = ""
    prompt: Span | None = None
    output: Span | None = None
    """With a data set: in place of the lengths it has."""
    dataset: Path | None = None
    trace: Path | None = None
    requests: int | None = None
    """Of a run; None: 100, or all of a data set or a trace."""
    seed: int = 0
    """Of lengths and arrivals."""
    content_seed: int = 0
    """Of the prompts' tokens."""
    ids: TokenRange = field(default_factory=TokenRange)
    sharing: Sharing | None = None
    kind: Kind = "like_vllm"
    burstiness: float = 1.0
    rates: tuple[float, ...] = ()
    """Requests a second, a run each (open loop); with a trace: in place of its own."""
    concurrency: tuple[int, ...] = ()
    """Requests in flight, a run each (closed loop)."""
    search: Search | None = None
    """For the goodput, in place of `rates`."""
    threshold: float = THRESHOLD
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class Load:
    """One run's load; exactly one of the two is not None."""

    rate: float | None = None
    """Requests a second."""
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} req/s" if self.rate is not None else f"{self.concurrency} in flight"


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement, ready to begin."""

    wanted: Wanted
    asks: Sequence[Ask]
    prompts: Prompts
    times: Sequence[float] | None
    """Send times of a trace, from 0; None: they are drawn."""
    loads: Sequence[Load]
    """Runs, in order; of a search none: it finds them."""
    workload: Workload

    def due(self, rate: float) -> list[float]:
        """When each request of an open loop at `rate` is sent, seconds from the run's start.

        The pattern is the same at all rates, only faster.
        """
        wanted = self.wanted
        if self.times is not None:
            return arrivals.scaled(list(self.times), rate) if wanted.rates else list(self.times)
        if wanted.kind == "like_vllm":
            return arrivals.like_vllm(rate, wanted.burstiness, len(self.asks), wanted.seed)
        return arrivals.gamma(rate, wanted.burstiness, len(self.asks), _rng(wanted.seed, _ARRIVALS))

    def check_context(self, longest: int | None) -> None:
        """Refuses what the served model has no room for.

        Raises:
            ContextExceeded: a prompt and its answer are longer than `longest` tokens.
        """
        for ask in self.asks if longest is not None else ():
            total = (ask.prompt_tokens or 1) + ask.output_tokens
            if longest is not None and total > longest:
                raise ContextExceeded(
                    f"request {ask.index} has {ask.prompt_tokens or 'some'} prompt and {ask.output_tokens} answer "
                    f"tokens: the model takes {longest} together"
                )


def make(wanted: Wanted, count_tokens: CountTokens | None = None) -> Plan:
    """Reads what is in files, draws the lengths, and says no to what cannot be.

    Raises:
        ConfigError: a value, or a combination, that makes no measurement; or a file that is not as it should be.
    """
    times, asks, lengths = _asks(wanted, count_tokens)
    loads = _loads(wanted, times)
    check_threshold(wanted.threshold)
    if wanted.kind == "poisson" and wanted.burstiness != 1:
        raise ConfigError("Poisson arrivals have no burstiness: choose gamma")
    if times is None:
        for load in loads:
            if load.rate is not None:
                arrivals.gamma(load.rate, wanted.burstiness, 1, _rng(0, 0))  # says what is wrong with them
    lengths |= {"token_ids": [wanted.ids.low, wanted.ids.high], "content_seed": wanted.content_seed}
    if wanted.sharing:
        sharing = wanted.sharing
        lengths |= {"hit_rate": sharing.hit_rate, "groups": sharing.groups, "block": sharing.block}
    workload = Workload(wanted.scenario, lengths, _arrivals(wanted, times), len(asks), wanted.seed)
    prompts = Prompts(asks, wanted.content_seed, wanted.ids, wanted.sharing)
    return Plan(wanted, asks, prompts, times, loads, workload)


def _asks(wanted: Wanted, count_tokens: CountTokens | None) -> tuple[list[float] | None, list[Ask], dict[str, Any]]:
    """Send times where a file has them, the requests, and what was asked for in words."""
    by_hand = wanted.prompt is not None or (wanted.output is not None and not wanted.dataset)
    given = [name for name, there in (
        ("a scenario", wanted.scenario), ("lengths", by_hand), ("a data set", wanted.dataset), ("a trace", wanted.trace)
    ) if there]  # fmt: skip
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given) or 'nothing'} {'say' if len(given) > 1 else 'says'} how long prompts and answers "
            "are: give one of --scenario, --input-len with --output-len, --dataset, --trace"
        )
    if wanted.requests is not None and wanted.requests < 1:
        raise ConfigError(f"{wanted.requests} requests: there must be at least one")
    if wanted.trace:
        times, asks = read_trace(wanted.trace)
        if wanted.requests and wanted.requests > len(asks):
            raise ConfigError(f"{wanted.trace} has {len(asks)} requests, {wanted.requests} were asked for")
        count = wanted.requests or len(asks)
        return times[:count], asks[:count], {"kind": "trace", "file": wanted.trace.name}
    rng = _rng(wanted.seed, _LENGTHS)
    if wanted.dataset:
        asks = read_dataset(wanted.dataset, wanted.requests, wanted.output, count_tokens, rng)
        return None, asks, {"kind": "dataset", "file": wanted.dataset.name, "output": str(wanted.output or "")}
    if wanted.scenario:
        if wanted.scenario not in SCENARIOS:
            raise ConfigError(f"no scenario {wanted.scenario!r}: there are {', '.join(SCENARIOS)}")
        prompt, output = (Span(length, length) for length in SCENARIOS[wanted.scenario])
    elif wanted.prompt is None or wanted.output is None:
        raise ConfigError("lengths by hand are two: --input-len and --output-len")
    else:
        prompt, output = wanted.prompt, wanted.output
    kind = "fixed" if prompt.low == prompt.high and output.low == output.high else "uniform"
    asks = draw(prompt, output, wanted.requests or REQUESTS, rng)
    return None, asks, {"kind": kind, "prompt": str(prompt), "output": str(output)}


def _loads(wanted: Wanted, times: Sequence[float] | None) -> list[Load]:
    given = [bool(wanted.rates), bool(wanted.concurrency), wanted.search is not None]
    if sum(given) > 1:
        raise ConfigError("--rate, --concurrency and --goodput are three different measurements: give one")
    if wanted.search is not None:
        if times is not None:
            raise ConfigError("a search for the goodput draws its arrivals: it does not go with --trace")
        if wanted.slo.empty:
            raise ConfigError("a goodput is of objectives: give --slo-ttft, --slo-itl, --slo-tpot or --slo-e2e")
        return []
    if wanted.concurrency:
        if min(wanted.concurrency) < 1:
            raise ConfigError(f"{min(wanted.concurrency)} requests in flight: at least 1")
        return [Load(concurrency=count) for count in wanted.concurrency]
    if wanted.rates:
        return [Load(rate=rate) for rate in wanted.rates]
    if times is None:
        raise ConfigError("how much load? give --rate, --concurrency or --goodput")
    span = times[-1]
    if len(times) > 1 and span <= 0:
        raise ConfigError("all requests of the trace have the same time: give --concurrency")
    # Of one request there is no gap: whatever is said, it is sent at once.
    return [Load(rate=(len(times) - 1) / span if len(times) > 1 else 1.0)]


def _arrivals(wanted: Wanted, times: Sequence[float] | None) -> Mapping[str, Any]:
    if wanted.concurrency:
        return {"kind": "closed"}
    if times is not None:
        return {"kind": "replay", "scaled": bool(wanted.rates)}
    return {"kind": wanted.kind, "burstiness": wanted.burstiness}


def _rng(seed: int, stream: int) -> Any:
    import numpy as np

    return np.random.default_rng([seed, stream])


Prompt = Callable[[int], str | Sequence[int]]


def prompt_of(plan: Plan, run: int) -> Prompt:
    """Makes the prompts of one run, by index."""
    return lambda index: plan.prompts.make(index, run)
