"""A deployment's processes, owned: started in order, waited for, watched, drained in the order that loses nothing.

Start: kvd, then engines and proxy side by side. Drain: proxy first (it takes no more and finishes
what it has, for which it needs the engines), then engines, then kvd.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from pdserve.cli import probe
from pdserve.cli.board import Board
from pdserve.cli.plan import Kind, Plan, Process
from pdserve.cli.processes import Child, Guard
from pdserve.client import AsyncClient, Engine, PdserveError, Retry, Unavailable

_POLL = 0.25
"""Seconds between two looks at what is not ready yet."""
_DRAIN: Sequence[Kind] = ("proxy", "engine", "kvd")


class Fleet:
    """The running processes of one plan, as an async context manager that leaves none behind."""

    def __init__(self, plan: Plan, board: Board, *, grace: float = 30.0) -> None:
        """`grace`: seconds that each stage of the drain may take."""
        self.plan = plan
        self._board = board
        self._grace = grace
        self._children: list[Child] = []
        self._guard: Guard | None = None
        self._deaths: asyncio.Queue[Child] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self.hurry = asyncio.Event()
        """Set to end the drain at once."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.pid for child in self._children}

    async def start(self, timeout: float) -> None:
        """Starts everything; returns when the proxy routes to every engine.

        Raises:
            Unavailable: a process ended; the message has the end of its log.
            Unavailable: not ready within `timeout` seconds; the message says what was not.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.unless_one_dies(self._bring_up())
        except TimeoutError:
            raise Unavailable(f"not ready within {timeout:g} s: {await self._unready()}") from None

    async def unless_one_dies(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, and ends it where a process dies first.

        Raises:
            Unavailable: a process ended; or what `work` raises.
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
        """Waits for a process to end without being asked to.

        Raises:
            Unavailable: one did; the message has the end of its log.
        """
        child = await self._deaths.get()
        end = child.returncode or 0
        how = f"was ended by signal {-end}" if end < 0 else f"ended with status {end}"
        self._board.show(child.name, how)
        raise Unavailable(
            f"{child.name} (pid {child.pid}) {how}; the end of its log {child.plan.log}:\n{child.log_tail()}"
        )

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
        """Drains and stops every process; safe twice."""
        for kind in _DRAIN:
            stage = [child for child in self._children if child.plan.kind == kind]
            for child in stage:
                if child.returncode is None:
                    self._board.show(child.name, "draining")
            await asyncio.gather(*(child.stop(self._grace, self.hurry) for child in stage))
            for child in stage:
                self._board.show(child.name, "stopped")
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._children.clear()
        self._watchers.clear()
        if self._guard is not None:
            await self._guard.aclose()

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
            child = await Child.start(process)
            self._children.append(child)
            await self._guard.watch(child)
            self._watchers.append(asyncio.create_task(self._report_end(child), name=f"watch {child.name}"))
            self._board.show(process.name, "starting")

    async def _all_serving(self, processes: Sequence[Process]) -> None:
        left = list(processes)
        while left:
            answers = await asyncio.gather(*(probe.serving(process.target) for process in left))
            for process, serves in zip(tuple(left), answers, strict=True):
                if serves:
                    left.remove(process)
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
        for child in self._children:
            if not await probe.serving(child.plan.target):
                states.append(f"{child.name} does not serve; the end of its log {child.plan.log}:\n{child.log_tail(8)}")
        if not states:
            states = [f"{name}: {why}" for name, why in (await self._not_routed()).items()]
        return "\n".join(states)

    async def _report_end(self, child: Child) -> None:
        await child.wait()
        if not child.stopping:
            self._deaths.put_nowait(child)
