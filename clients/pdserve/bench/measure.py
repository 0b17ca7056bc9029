"""One measurement from the first question to the results: meets the endpoint, offers each load, sums up."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol, TypeVar

from pdserve.bench import transport
from pdserve.bench.endpoint import Asking, Endpoint, Trail
from pdserve.bench.goodput import goodput_of
from pdserve.bench.plan import Load, Plan, prompt_of
from pdserve.bench.results import SCHEMA, Failure, Goodput, Machine, Results, Run, Target, Tried
from pdserve.bench.runner import Brake, Runner, Watch
from pdserve.bench.summary import summarise
from pdserve.bench.transport import Expected, KvdFacts
from pdserve.rpc.errors import DeadlinePassed, PdserveError, RequestCancelled, Unavailable

T = TypeVar("T")
MEET_S = 10.0
"""Longest wait for an endpoint's word about itself."""
PROBE_S = 60.0
"""Longest wait for the probe's answer: a first request may make an engine compile something."""


class View(Watch, Protocol):
    """Shows a measurement as it goes."""

    def begin(self, load: Load, requests: int) -> None:
        """A run begins."""
        ...

    def end(self, run: Run) -> None:
        """A run is over."""
        ...

    def say(self, line: str) -> None:
        """Something the user should know now."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how to ask."""

    address: str
    api: Literal["grpc", "http"]
    asking: Asking
    expected: Expected
    machine: Machine
    label: str = ""
    warmups: int = 0
    """Requests of the workload's kind that are sent one after another before the first run, and forgotten."""
    ask_kvd: Callable[[], Awaitable[KvdFacts]] | None = None
    """None: no kvd can be asked from here."""


class Measurement:
    """Runs one plan against one endpoint."""

    def __init__(
        self,
        plan: Plan,
        endpoint: Endpoint,
        setup: Setup,
        brake: Brake,
        view: View,
        *,
        keep: Callable[[Results], None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`keep` is given the results after every run, so that what was measured outlives what happens next."""
        self._plan = plan
        self._endpoint = endpoint
        self._setup = setup
        self._brake = brake
        self._view = view
        self._keep = keep
        self._now = now
        self._runs: list[Run] = []
        self._goodput: Goodput | None = None

    async def run(self) -> Results:
        """The results; partial ones where the brake was pulled.

        Raises:
            PdserveError: nothing could be measured: the endpoint does not answer, or not as was asked for.
        """
        created = _iso(self._now())
        target = await unless_pulled(self._brake, self._meet())
        await unless_pulled(self._brake, self._warm())
        first = Results(
            SCHEMA, created, self._setup.label, target, self._setup.machine, self._plan.workload,
            self._plan.wanted.slo, (), None, True, "the measurement still ran when this was written",
        )  # fmt: skip
        try:
            if self._plan.wanted.search is not None:
                await self._search(first)
            else:
                await self._sweep(first)
        except BaseException as error:
            # What was kept after the last whole run says only that it still ran.
            self._brake.pull(f"broke off: {error or type(error).__name__}")
            raise
        finally:
            results = self._results(first)
            if self._runs:
                self._keep(results)
        return results

    async def _meet(self) -> Target:
        """Learns what is there, and refuses what would be measured by mistake."""
        setup, asking = self._setup, self._setup.asking
        described = await self._endpoint.describe(MEET_S)
        self._plan.check_context(described.max_model_len)
        room = (described.max_model_len or transport.PROBE_TOKENS * 2) - transport.ANSWER_TOKENS
        answered = await transport.probe(self._endpoint, self._fresh(min(transport.PROBE_TOKENS, room), 0), PROBE_S)
        kvd = await setup.ask_kvd() if setup.ask_kvd and answered.transport else None
        used = transport.judge(answered, asking, kvd, setup.expected)
        self._view.say(_met(described.model, answered.mode, used, kvd))
        return Target(setup.address, setup.api, described.model, answered.mode, used, tuple(described.engines))

    async def _warm(self) -> None:
        """One after another, with content of their own."""
        for number in range(self._setup.warmups):
            ask = self._plan.asks[number % len(self._plan.asks)]
            prompt = self._fresh(ask.prompt_tokens or transport.PROBE_TOKENS, number + 1)
            send = self._endpoint.prepare(prompt, ask.output_tokens)
            try:
                async with asyncio.timeout(self._setup.asking.timeout):
                    await send(Trail())
            except TimeoutError:
                raise DeadlinePassed(
                    f"warm-up request {number + 1} had no end within {self._setup.asking.timeout:g} s"
                ) from None

    def _fresh(self, tokens: int, serial: int) -> str | list[int]:
        """A prompt of the workload's kind that no run has; of a text the length is not exact."""
        ids = self._plan.prompts.fresh(tokens, serial)
        return " ".join(map(str, ids)) if self._plan.asks[0].text is not None else ids

    async def _sweep(self, first: Results) -> None:
        for load in self._plan.loads:
            await self._offer(load, first)
            if self._brake.pulled:
                return
        wanted = self._plan.wanted
        if wanted.rates and not wanted.slo.empty:
            tried = [
                Tried(run.rate, run.summary.attainment, run.summary.requests)
                for run in self._runs
                if run.rate is not None
            ]
            many = f"the highest of {len(tried)} rates that were asked for"
            self._goodput = goodput_of(tried, wanted.threshold, many if len(tried) > 1 else "one rate was asked for")

    async def _search(self, first: Results) -> None:
        search = self._plan.wanted.search
        steps = search.steps() if search else None
        while steps is not None:
            try:
                last = self._runs[-1].summary if self._runs else None
                rate = steps.send((last.attainment, last.requests)) if last else next(steps)
            except StopIteration as ended:
                self._goodput = ended.value
                return
            await self._offer(Load(rate=rate), first)
            if self._brake.pulled:
                return

    async def _offer(self, load: Load, first: Results) -> None:
        """One run; keeps what there is so far."""
        plan, number = self._plan, len(self._runs)
        timeout = self._setup.asking.timeout
        runner = Runner(self._endpoint, plan.wanted.slo, self._brake, self._view, timeout=timeout)
        self._view.begin(load, len(plan.asks))
        started, prompt = _iso(self._now()), prompt_of(plan, number)
        if load.rate is not None:
            ran = await runner.open_loop(plan.asks, plan.due(load.rate), prompt)
        else:
            ran = await runner.closed_loop(plan.asks, load.concurrency or 1, prompt)
        summary = summarise(ran.records, ran.duration, load.rate)
        run = Run(
            load.rate,
            load.concurrency,
            started,
            ran.duration,
            summary,
            ran.records,
            partial=ran.broke_off or self._brake.pulled,
        )
        if summary.failed and not self._brake.pulled:
            run = await self._still_there(run, ran.fault)
        wrong = transport.refused(run.requests, self._setup.expected)
        run = dataclasses.replace(run, doubts=(*((wrong,) if wrong else ()), *self._doubts(run, first.target)))
        self._runs.append(run)
        self._view.end(run)
        for doubt in run.doubts:
            self._view.say(doubt)
        if wrong:
            self._brake.pull(f"at {load}: {wrong}")
        if not self._brake.pulled:
            self._keep(dataclasses.replace(first, runs=tuple(self._runs)))

    async def _still_there(self, run: Run, fault: Failure | None) -> Run:
        """The run, as partial where its failures were the endpoint's end."""
        try:
            if fault and not run.summary.completed:  # where all was too much or too late, it is the load that failed
                raise Unavailable(f"not one request completed, the first failed with {fault.reason}: {fault.message}")
            await self._endpoint.describe(MEET_S)
        except PdserveError as error:
            self._brake.pull(f"the endpoint failed: {error.message}")
            return dataclasses.replace(run, partial=True)
        return run

    def _doubts(self, run: Run, target: Target) -> list[str]:
        """What a reader of the figures would not think of, in words."""
        doubts = []
        done = [record for record in run.requests if record.error is None]
        asked = {ask.index: ask.output_tokens for ask in self._plan.asks}
        if short := sum(record.output_tokens != asked[record.index] for record in done):
            doubts.append(f"{short} answers are not as long as was asked for")
        used = sorted({record.transport or "nothing" for record in done})
        probed = target.transport or "nothing"
        if len(used) == 1 and used != [probed]:
            doubts.append(f"the KV cache was moved by {used[0]}, in the probe by {probed}")
        if len(used) > 1:
            doubts.append(f"the KV cache was moved by {' and '.join(used)}: not one transport for all")
        if (late := run.summary.late) and (ttft := run.summary.ttft) and late.p99 > max(0.1 * ttft.p50, 0.005):
            doubts.append(f"the client itself was late by {late.p99 * 1e3:.0f} ms at p99: the load was not as offered")
        return doubts

    def _results(self, first: Results) -> Results:
        why = self._brake.why
        if why and (left := self._plan.loads[len(self._runs) :]):
            why += f"; not measured: {', '.join(map(str, left))}"
        return dataclasses.replace(
            first, runs=tuple(self._runs), goodput=self._goodput, partial=bool(why), why_partial=why
        )


async def unless_pulled(brake: Brake, work: Awaitable[T]) -> T:
    """What `work` gives.

    Raises:
        RequestCancelled: the brake was pulled first; the work has been cancelled.
    """
    task, pulled = asyncio.ensure_future(work), asyncio.create_task(brake.wait())
    try:
        await asyncio.wait({task, pulled}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelled(f"nothing was measured: {brake.why}")
        return task.result()
    finally:
        for one in (task, pulled):
            one.cancel()
        await asyncio.gather(task, pulled, return_exceptions=True)


def _met(model: str, mode: str, used: str, kvd: KvdFacts | None) -> str:
    if not mode:
        return f"{model}: answers without a hand-over, or does not say how"
    copier = f" ({kvd.copier} copies)" if kvd and kvd.copier else "; kvd was not asked"
    return f"{model}: mode {mode}, the KV cache moves over {used or 'something without a name'}{copier}"


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
