"""Offers the rates of a comparison to one deployment, and reads meanwhile what every process uses.

Arrivals and prompts follow from the repeat and the rate alone, so that every configuration gets the same ones. No two
requests have a common prefix, neither in a rate nor between rates and repeats: no prefix cache helps.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.ask_kvd import ask
from pdserve.bench.compare import cpu
from pdserve.bench.compare.configurations import Configuration
from pdserve.bench.compare.deployment import Ready
from pdserve.bench.compare.folder import Share
from pdserve.bench.compare.settings import Settings
from pdserve.bench.endpoint import Asking
from pdserve.bench.measure import MEET_S, Measurement, Setup, View
from pdserve.bench.over_grpc import GrpcEndpoint
from pdserve.bench.plan import Load, Plan, Wanted, make
from pdserve.bench.results import Machine, Record, Results, Run
from pdserve.bench.runner import Brake
from pdserve.bench.slo import Slo
from pdserve.bench.transport import Expected
from pdserve.bench.workload.lengths import Span

CLIENT = "client"
"""This process, in a `Share`."""
QUIET = 0.2
"""Cores that the rest of the machine may use before a run is said to be disturbed."""
_RATES = 1000
"""More than there are rates: content seeds of two repeats never meet."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What is the same for all deployments of a comparison."""

    settings: Settings
    slo: Slo
    machine: Machine
    expected: Expected
    """What is said of the transport."""
    timeout: float
    """Of one request, seconds."""


class Metered:
    """A view that reads the processes' CPU time where a run begins and where it ends."""

    def __init__(self, inner: View, processes: Mapping[str, int]) -> None:
        self._inner = inner
        self._processes = {**processes, CLIENT: os.getpid()}
        self._before: cpu.Reading | None = None
        self.shares: list[Share] = []
        """Of the runs so far."""

    def begin(self, load: Load, requests: int) -> None:
        """See View."""
        self._inner.begin(load, requests)
        self._before = cpu.read(self._processes)

    def sent(self) -> None:
        """See Watch."""
        self._inner.sent()

    def ended(self, record: Record) -> None:
        """See Watch."""
        self._inner.ended(record)

    def end(self, run: Run) -> None:
        """See View."""
        if self._before is not None and run.rate is not None:
            after = cpu.read(self._processes)
            self.shares.append(Share(run.rate, after.at - self._before.at, cpu.cores(self._before, after)))
        self._inner.end(run)

    def say(self, line: str) -> None:
        """See View."""
        self._inner.say(line)


def plan_of(settings: Settings, slo: Slo, repeat: int, rate: int) -> Plan:
    """What is sent at one rate, by its index, in one repeat."""
    return make(
        Wanted(
            prompt=Span(settings.input_len, settings.input_len),
            output=Span(settings.output_len, settings.output_len),
            requests=settings.requests[rate],
            seed=settings.seed + repeat,
            content_seed=(settings.seed + repeat) * _RATES + rate,
            burstiness=settings.burstiness,
            rates=(settings.rates[rate],),
            threshold=settings.threshold,
            slo=slo,
        )
    )


async def sweep(
    ready: Ready,
    configuration: Configuration,
    repeat: int,
    rates: Sequence[int],
    offer: Offer,
    brake: Brake,
    view: View,
) -> tuple[Results, tuple[Share, ...]]:
    """All rates, by index, ascending; partial results where the brake was pulled.

    Raises:
        PdserveError: nothing was measured: no answer, or one over a fallback that was not allowed.
    """
    metered = Metered(view, ready.processes)
    asking = Asking(mode=configuration.mode, timeout=offer.timeout)
    found: Results | None = None
    async with contextlib.aclosing(GrpcEndpoint(ready.grpc, asking)) as endpoint:
        for place, rate in enumerate(rates):
            setup = Setup(
                address=ready.grpc,
                api="grpc",
                asking=asking,
                # A colocated engine hands nothing over, whatever is expected of the others.
                expected=offer.expected if configuration.mode else Expected(),
                machine=offer.machine,
                label=configuration.label,
                warmups=0 if place else offer.settings.warmup,
                ask_kvd=lambda: ask(ready.kvd, MEET_S),
            )
            plan = plan_of(offer.settings, offer.slo, repeat, rate)
            one = await Measurement(plan, endpoint, setup, brake, metered).run()
            found = one if found is None else joined(found, one)
            if brake.pulled:
                break
    if found is None:
        raise ValueError("no rate was asked for")
    return found, tuple(metered.shares)


def joined(first: Results, later: Results) -> Results:
    """Two measurements of one configuration as one: the runs of both. Their goodput is the comparison's to say."""
    return dataclasses.replace(
        first,
        runs=(*first.runs, *later.runs),
        goodput=None,
        partial=first.partial or later.partial,
        why_partial=first.why_partial or later.why_partial,
    )


def doubts(configuration: Configuration, results: Results, shares: Sequence[Share] = ()) -> list[str]:
    """What would make a reader misjudge these runs, in words; empty: nothing."""
    done = [record for run in results.runs for record in run.requests if record.error is None]
    found = []
    if astray := sum(record.mode != configuration.mode for record in done):
        how = f"in mode {configuration.mode}" if configuration.mode else "by one engine"
        found.append(f"{astray} of {len(done)} answers were not made {how}")
    if cached := sum(record.cached_tokens for record in done):
        found.append(f"{cached} prompt tokens came from a prefix cache, none should have")
    loud = [f"{share.cores[cpu.OTHERS]:.2f} at {share.rate:g} req/s" for share in shares if _loud(share)]
    if loud:
        found.append(f"something else on this machine used cores: {', '.join(loud)}")
    return found


def _loud(share: Share) -> bool:
    return share.cores.get(cpu.OTHERS, 0.0) > QUIET
