"""One process of a deployment through all its lives: started, watched, started again when it dies, stopped once.

starting ──▶ serving ──▶ dead ──▶ what it left is killed ──▶ pause ──▶ starting ...
    └──────────────────────┴─ never served, or no restart left: lost, which ends the deployment if it needs the process
"""

import asyncio
import time
from collections.abc import Callable

from pdserve.cli import probe
from pdserve.cli.board import Board
from pdserve.cli.plan import Process
from pdserve.cli.processes import Child, Guard
from pdserve.cli.restarts import Allowance
from pdserve.client import ConfigError, PdserveError, Unavailable

_POLL = 0.25
"""Seconds between two looks at one that is starting."""
_SHOWN = 4
"""Lines of a log that are shown when a process is started again."""
_MISCONFIGURED = 2
"""Exit status of each service for settings that cannot work, as argparse has it too."""

Lost = Callable[[PdserveError], None]


class Keeper:
    """Keeps a process running at its addresses, which stay those of the plan."""

    def __init__(self, plan: Process, guard: Guard, board: Board, allowance: Allowance, *, patience: float) -> None:
        """`patience`: seconds that a restart may take until it serves."""
        self.plan = plan
        self._guard = guard
        self._board = board
        self._allowance = allowance
        self._patience = patience
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self.has_served = False
        """Whether somebody saw it serve; only then is it started again."""
        self.away = False
        """Whether it has died and does not serve again yet."""

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name

    @property
    def pid(self) -> int:
        """Of the process that runs, or of the one that ran last; 0 before the first."""
        return self._child.pid if self._child is not None else 0

    @property
    def runs(self) -> bool:
        """Whether it runs now."""
        return self._child is not None and self._child.returncode is None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._allowance.used

    @property
    def child(self) -> Child:
        """The process that runs, or the one that ran last; only after `start`."""
        assert self._child is not None, "not started"
        return self._child

    async def start(self, lost: Lost, changed: Callable[[], None]) -> None:
        """Starts it and watches it until `stop`. `changed` is called when it has another pid, `lost` once, when it
        has ended for good: with an error that says how and why, and has the end of its log.

        Raises:
            OSError: the program or the log folder is not there.
        """
        await self._spawn()
        self._task = asyncio.create_task(self._keep(lost, changed), name=f"keep {self.name}")

    def served(self) -> None:
        """Somebody saw it serve: from now on it may be started again."""
        self.has_served = True

    async def let_go(self) -> None:
        """From now on its end is nobody's business, and it is not started again; safe twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Lets go of it and ends it, as Child.stop; safe twice."""
        await self.let_go()
        if self._child is not None:
            await self._child.stop(grace, hurry)

    async def _keep(self, lost: Lost, changed: Callable[[], None]) -> None:
        try:
            while True:
                await self.child.wait()
                await self._again(changed)
        except PdserveError as error:
            lost(error)
        except OSError as error:
            lost(Unavailable(f"{self.name} cannot be started again: {error}"))
        except Exception as defect:  # noqa: BLE001  # else nobody would watch the process any more, nor hear of it
            lost(PdserveError(f"{self.name} is not watched any more: {type(defect).__name__}: {defect}"))

    async def _again(self, changed: Callable[[], None]) -> None:
        """The next life, until it serves or has ended too.

        Raises:
            ConfigError: there is none, and it has ended because of its settings.
            Unavailable: there is none, or it does not serve in time.
        """
        child, how = self.child, self.child.how_it_ended()
        who = f"{self.name} (pid {child.pid}) {how}"
        self.away = True
        self._board.show(self.name, how)
        pause = self._allowance.take() if self.has_served else None
        if pause is None:
            last = f" after restart {self.restarts} of {self._allowance.most}" if self.restarts else ""
            why = f": {sentence}" if (sentence := child.why_it_ended()) else ""
            said = f"{who}{last}{why}; the end of its log {self.plan.log}:\n{child.log_tail()}"
            raise ConfigError(said) if child.returncode == _MISCONFIGURED else Unavailable(said)
        when = f"again in {pause:g} s" if pause else "again"
        log = "".join(f"\n    {line}" for line in child.log_tail(_SHOWN).splitlines())
        counted = f"restart {self.restarts} of {self._allowance.most}"
        self._board.say(f"{who}; it is started {when}, {counted}; the end of its log {self.plan.log}:{log}")
        # An engine's own processes outlive it for a moment; the new one needs their cores and memory.
        await child.clear()
        await self._guard.forget(child)
        await asyncio.sleep(pause)
        await self._spawn(again=True)
        changed()
        await self._until_serving()

    async def _spawn(self, *, again: bool = False) -> None:
        self._child = await Child.start(self.plan, again=again)
        await self._guard.watch(self._child)
        self._board.show(self.name, "starting")

    async def _until_serving(self) -> None:
        """Returns when it serves, or has ended.

        Raises:
            Unavailable: neither, in time.
        """
        until = time.monotonic() + self._patience
        while self.child.returncode is None:
            if await probe.up(self.plan):
                self.away = False
                self._board.show(self.name, "serving")
                return
            if time.monotonic() > until:
                raise Unavailable(
                    f"{self.name} was started again and did not serve within {self._patience:g} s; "
                    f"the end of its log {self.plan.log}:\n{self.child.log_tail()}"
                )
            await asyncio.sleep(_POLL)
