"""A deployment's processes, owned: started in order, waited for, kept, drained in the order that loses nothing.

Start: kvd, then engines and proxy side by side. One that dies later is started again by its keeper, by itself: the
others find it at its address. When the trace store has ended for good the others go on without it. Drain: proxy first
(it takes no more and finishes what it has, for which it needs the engines), then engines, then kvd; last the trace
store, which takes what the proxy had left to say.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from pdserve.cli import failpoints, probe
from pdserve.cli.board import Board
from pdserve.cli.keeper import Keeper
from pdserve.cli.plan import Kind, Plan, Process
from pdserve.cli.processes import Guard
from pdserve.cli.restarts import STEP, Allowance
from pdserve.client import AsyncClient, Engine, PdserveError, Retry, Unavailable

_POLL = 0.25
"""Seconds between two looks at what is not ready yet."""
_DRAIN: Sequence[Kind] = ("proxy", "engine", "kvd", "traces")
_OPTIONAL: Mapping[Kind, str] = {"traces": "traces are not kept any more"}
"""What a deployment serves without, and what it says when one of them has ended for good."""


class Fleet:
    """The running processes of one plan, as an async context manager that leaves none behind."""

    def __init__(
        self, plan: Plan, board: Board, *, grace: float = 30.0, restarts: int = 0, pause_step: float = STEP
    ) -> None:
        """`grace`: seconds that each stage of the drain may take. `restarts`: how often each process that has served is
        started again when it dies, with pauses that grow by `pause_step` seconds.

        Raises:
            ConfigError: failpoints in our environment that are not said to be one process's.
        """
        self.plan = replace(plan, processes=failpoints.addressed(plan.processes, os.environ))
        self._board = board
        self._grace = grace
        self._restarts = restarts
        self._pause_step = pause_step
        self._patience = 0.0
        self._keepers: list[Keeper] = []
        self._done_without: set[str] = set()
        self._guard: Guard | None = None
        self._lost: asyncio.Queue[PdserveError] = asyncio.Queue()
        self.changed: Callable[[], None] = lambda: None
        """Called when `pids` has changed."""
        self.hurry = asyncio.Event()
        """Set to end the drain at once."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; of one that is about to be started again, the old one; none of one
        that the deployment goes on without."""
        return {
            keeper.name: keeper.pid for keeper in self._keepers if keeper.pid and keeper.name not in self._done_without
        }

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again, by name."""
        return {keeper.name: keeper.restarts for keeper in self._keepers}

    @property
    def away(self) -> set[str]:
        """Names of those that have died and do not serve again yet."""
        return {keeper.name for keeper in self._keepers if keeper.away}

    async def start(self, timeout: float) -> None:
        """Starts everything; returns when the proxy routes to every engine.

        Raises:
            ConfigError: a process ended because of its settings; the message has the end of its log.
            Unavailable: a process ended for another reason; the message has the end of its log.
            Unavailable: not ready within `timeout` seconds; the message says what was not.
        """
        self._patience = timeout
        try:
            async with asyncio.timeout(timeout):
                await self.unless_one_dies(self._bring_up())
        except TimeoutError:
            raise Unavailable(f"not ready within {timeout:g} s: {await self._unready()}") from None

    async def unless_one_dies(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, and ends it where a process that is needed dies first for good.

        Raises:
            Unavailable, ConfigError: a process ended and is not started again; or what `work` raises.
        """
        doing, death = asyncio.ensure_future(work), asyncio.ensure_future(self.died())
        try:
            await asyncio.wait({doing, death}, return_when=asyncio.FIRST_COMPLETED)
            await (death if death.done() else doing)
        finally:
            doing.cancel()
            death.cancel()
            await asyncio.gather(doing, death, return_exceptions=True)

    async def died(self) -> NoReturn:
        """Waits for a process that is needed to end without being asked to, and for good.

        Raises:
            Unavailable, ConfigError: one did; the message has the end of its log.
        """
        raise await self._lost.get()

    async def engines(self) -> dict[str, Engine]:
        """Engines that the proxy knows, by process name.

        Raises:
            PdserveError: the proxy does not answer.
        """
        async with AsyncClient(self.plan.grpc, timeout=3.0, retry=Retry(attempts=1)) as client:
            topology = await client.topology()
        by_address = {engine.address: engine for engine in topology.engines}
        return {
            process.name: by_address[process.target]
            for process in self.plan.processes
            if process.kind == "engine" and process.target in by_address
        }

    async def aclose(self) -> None:
        """Drains and stops every process; safe twice.

        Raises:
            Unavailable: one was killed and does not end; the others have.
        """
        failures: list[BaseException] = []
        for keeper in self._keepers:
            await keeper.let_go()
        for kind in _DRAIN:
            stage = [keeper for keeper in self._keepers if keeper.plan.kind == kind]
            for keeper in stage:
                if keeper.runs:
                    self._board.show(keeper.name, "draining")
            stops = (keeper.stop(self._grace, self.hurry) for keeper in stage)
            for keeper, failure in zip(stage, await asyncio.gather(*stops, return_exceptions=True), strict=True):
                self._board.show(keeper.name, "stopped" if failure is None else "does not end")
                failures += [failure] if failure is not None else []
        self._keepers.clear()
        if self._guard is not None:
            await self._guard.aclose()
        for failure in failures:
            raise failure

    async def __aenter__(self) -> Self:
        self._guard = await Guard.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _bring_up(self) -> None:
        kvd = [process for process in self.plan.processes if process.kind == "kvd"]
        rest = [process for process in self.plan.processes if process.kind != "kvd"]
        await self._spawn(kvd)
        await self._all_serving(kvd)
        await self._spawn(rest)
        await self._all_serving(rest)
        while waiting := await self._not_routed():
            for name, why in waiting.items():
                self._board.show(name, why)
            await asyncio.sleep(_POLL)

    async def _spawn(self, processes: Iterable[Process]) -> None:
        assert self._guard is not None, "used outside of its context"
        for process in processes:
            allowance = Allowance(self._restarts, self._pause_step)
            keeper = Keeper(process, self._guard, self._board, allowance, patience=self._patience)
            self._keepers.append(keeper)
            await keeper.start(partial(self._ended, keeper), lambda: self.changed())

    def _ended(self, keeper: Keeper, error: PdserveError) -> None:
        """For good. One that never served is a mistake in the start, whatever it is for."""
        said = _OPTIONAL.get(keeper.plan.kind)
        if said is None or not keeper.has_served:
            self._lost.put_nowait(error)
            return
        self._done_without.add(keeper.name)
        self._board.say(f"{said}; {error.message}")
        self.changed()

    async def _all_serving(self, processes: Sequence[Process]) -> None:
        left = list(processes)
        while left:
            answers = await asyncio.gather(*(probe.up(process) for process in left))
            for process, serves in zip(tuple(left), answers, strict=True):
                if serves:
                    left.remove(process)
                    self._keeper(process.name).served()
                    self._board.show(process.name, "serving")
            self._board.refresh()
            if left:
                await asyncio.sleep(_POLL)

    async def _not_routed(self) -> dict[str, str]:
        """Engines that the proxy does not use yet, with the reason; shows the others as ready."""
        waiting: dict[str, str] = {}
        try:
            known = await self.engines()
        except PdserveError as error:
            return {"proxy": error.message}
        for process in self.plan.processes:
            if process.kind != "engine":
                continue
            engine = known.get(process.name)
            if engine is None:
                waiting[process.name] = "serving, not registered yet"
            elif engine.state != "ready" or engine.excluded_because:
                waiting[process.name] = engine.excluded_because or engine.state
            else:
                self._board.show(process.name, "ready")
        return waiting

    async def _unready(self) -> str:
        states = []
        for keeper in self._keepers:
            if keeper.pid and not await probe.up(keeper.plan):
                said = keeper.child.log_tail(8)
                states.append(f"{keeper.name} does not serve; the end of its log {keeper.plan.log}:\n{said}")
        if not states:
            states = [f"{name}: {why}" for name, why in (await self._not_routed()).items()]
        return "\n".join(states)

    def _keeper(self, name: str) -> Keeper:
        return next(keeper for keeper in self._keepers if keeper.name == name)
