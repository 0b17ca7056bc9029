"""The order of things in a comparison: objectives, token budget, then every configuration once in each repeat.

One deployment at a time has the machine. A start costs more than a rate, so one deployment is offered all rates, and
repeats interleave the configurations: each repeat begins one configuration further on. Every step is kept at once, and
a comparison that is started again goes on behind the last whole one.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pdserve.bench.compare import budget as budgets
from pdserve.bench.compare import objectives
from pdserve.bench.compare.calibration import calibrate
from pdserve.bench.compare.configurations import CONFIGURATIONS, PAIR, Configuration, rotated, up_words
from pdserve.bench.compare.deployment import Deployment, Ready
from pdserve.bench.compare.folder import Cell, Folder, stem
from pdserve.bench.compare.ratios import curve
from pdserve.bench.compare.settings import Settings
from pdserve.bench.compare.sweep import Offer, doubts, sweep
from pdserve.bench.compare.tables import run_line
from pdserve.bench.measure import View, unless_pulled
from pdserve.bench.runner import Brake
from pdserve.bench.slo import Slo
from pdserve.bench.transport import Expected
from pdserve.rpc.errors import ConfigError, PdserveError, RequestCancelled, Unavailable, from_reason

_DYING = 5.0
"""Seconds that a deployment gets to say that it has died, when its requests fail."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a comparison is carried out; nothing of it changes what is measured."""

    expected: Expected
    """What is said of the transport."""
    start_timeout: float
    """Of one deployment, seconds."""
    timeout: float
    """Of one request, seconds."""
    say: Callable[[str], None]
    """Told what is being done."""
    view: Callable[[], AbstractContextManager[View]]
    """Shows the runs of one deployment."""


class Comparison:
    """Carries out one comparison into its folder."""

    def __init__(self, folder: Folder, settings: Settings, manner: Manner) -> None:
        self._folder = folder
        self._settings = settings
        self._manner = manner
        self._say = manner.say
        self.stopped = ""
        """Why `stop` was called; empty: it was not."""
        self._brake = Brake()
        self._deployment: Deployment | None = None

    def stop(self, why: str) -> None:
        """Ends it at the next moment; told again, it ends what runs without draining it."""
        if self.stopped and self._deployment is not None:
            self._deployment.hurry.set()
        self.stopped = self.stopped or why
        self._brake.pull(why)

    async def run(self, configurations: Sequence[Configuration], repeats: int) -> None:
        """Measures what the folder does not have yet.

        Raises:
            PdserveError: a deployment did not start, died or did not answer; names the configuration.
            RequestCancelled: it was stopped. What is whole has been kept in both cases.
        """
        slo = await self._objectives()
        offer = Offer(self._settings, slo, self._folder.state.machine, self._manner.expected, self._manner.timeout)
        if any(one.tuned for one in configurations):
            await self._tune(offer)
        total = len(configurations) * repeats
        for repeat in range(repeats):
            for place, configuration in enumerate(rotated(configurations, repeat)):
                number = f"[{repeat * len(configurations) + place + 1}/{total}]"
                if self._folder.find(configuration.key, repeat):
                    self._say(f"{number} {configuration.label}, repeat {repeat + 1}: measured already")
                else:
                    self._say(f"{number} {configuration.label}, repeat {repeat + 1} of {repeats}")
                    await self._cell(configuration, repeat, offer)

    async def _objectives(self) -> Slo:
        """The SLOs that the folder has, or new ones."""
        state = self._folder.state
        if state.calibration is None or state.slo is None:
            self._say(f"objectives: {PAIR.label}, one engine beside a busy one")
            async with self._deployed(PAIR, None, "calibration") as ready:
                work = calibrate(ready.grpc, self._settings, self._manner.timeout, self._say)
                found = await unless_pulled(self._brake, work)
            self._folder.keep(calibration=found, slo=objectives.slo_of(found))
            state = self._folder.state
        if state.calibration is None or state.slo is None:
            raise ValueError("the calibration was kept a line above")
        self._say(objectives.words(state.calibration))
        if caution := objectives.caution(state.calibration, self._settings.threshold):
            self._say(f"CAUTION: {caution}")
        return state.slo

    async def _tune(self, offer: Offer) -> None:
        """Finds the tuned pair's budget, unless the folder has it or there is only one to take."""
        state, tuned = self._folder.state, CONFIGURATIONS["e"]
        if state.budget is not None or state.calibration is None:
            return
        wanted = budgets.candidates(state.calibration, self._settings.input_len, self._settings.budgets)
        if len(wanted) > 1:
            rate = self._settings.rates[self._settings.trial]
            self._say(f"token budgets {', '.join(map(str, wanted))} at {rate:g} req/s, {tuned.label}")
        for budget in wanted if len(wanted) > 1 else ():
            if any(trial.budget == budget for trial in self._folder.state.trials):
                continue
            async with self._deployed(tuned, budget, f"budget-{budget}") as ready:
                with self._manner.view() as view:
                    rates = [self._settings.trial]
                    results, _ = await sweep(ready, tuned, 0, rates, offer, self._brake, view)
                self._whole(results.partial, results.why_partial)
            trial = budgets.trial_of(budget, results.runs[0])
            self._folder.keep(trials=(*self._folder.state.trials, trial))
            self._say(
                f"budget {budget}: attainment {trial.attainment:.0%}, of the ITL alone {trial.itl_attainment:.0%}"
            )
        found = budgets.best(self._folder.state.trials).budget if len(wanted) > 1 else wanted[0]
        self._folder.keep(budget=found)
        self._say(f"token budget of {tuned.label}: {found}")

    async def _cell(self, configuration: Configuration, repeat: int, offer: Offer) -> None:
        """One configuration in one repeat, all rates."""
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        rates = range(len(self._settings.rates))
        name = stem(configuration.key, repeat)
        async with self._deployed(configuration, self._folder.state.budget, name) as ready:
            with self._manner.view() as view:
                results, shares = await sweep(ready, configuration, repeat, rates, offer, self._brake, view)
            command = self._deployment.command if self._deployment else ()
            if results.partial:
                self._folder.add_partial(configuration.key, repeat, results)
            self._whole(results.partial, results.why_partial)
        order = 1 + max((cell.order for cell in self._folder.state.cells), default=-1)
        cell = Cell(configuration.key, repeat, order, started, ready.after, command, shares)
        self._folder.add(cell, results)
        for point in curve(configuration.key, [results.runs], self._settings.threshold).points:
            self._say(f"  {run_line(point)}")
        for doubt in doubts(configuration, results, shares):
            self._say(f"  CAUTION: {doubt}")

    @contextlib.asynccontextmanager
    async def _deployed(self, configuration: Configuration, budget: int | None, name: str) -> AsyncIterator[Ready]:
        """The configuration, running; errors of it, and of what is done with it, name it."""
        if self.stopped:
            raise RequestCancelled(f"not started: {self.stopped}")
        self._brake = Brake()

        def words(state_dir: Path) -> tuple[str, ...]:
            return up_words(configuration, self._settings, budget, state_dir, self._manner.start_timeout)

        logs = self._folder.path / "logs" / name
        deployment = self._deployment = Deployment(words, self._manner.start_timeout, logs)
        try:
            async with deployment:
                ready = await unless_pulled(self._brake, deployment.start())
                self._say(f"  ready after {ready.after:.0f} s")
                try:
                    yield ready
                except PdserveError as error:
                    if not self.stopped and not isinstance(error, ConfigError):
                        await deployment.check(_DYING)  # its own death is the better reason
                    raise
        except PdserveError as error:
            raise from_reason(error.reason, f"{configuration.label}: {error.message}") from error
        finally:
            self._deployment = None

    def _whole(self, partial: bool, why: str) -> None:
        """Raises where a sweep broke off."""
        if partial and self.stopped:
            raise RequestCancelled(self.stopped)
        if partial:
            raise Unavailable(why)
