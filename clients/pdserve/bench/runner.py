"""Sends one run's requests, in an open or a closed loop, and keeps what came of each.

Open loop: each request goes out when it is due, however slow the answers are. Closed loop: the next goes out when
one of N has ended. A request that fails is a result; a run breaks off only through its `Brake`.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.bench.endpoint import Clock, Endpoint, Outcome, Send, Trail, failure
from pdserve.bench.record import make_record
from pdserve.bench.results import Failure, Record
from pdserve.bench.slo import Slo
from pdserve.bench.workload.asks import Ask
from pdserve.rpc.errors import DeadlinePassed, Overloaded, PdserveError, RequestCancelled

GIVE_UP = 10
"""So many failures in a row, with no success between, mean that the endpoint is gone; 0: none do."""
OF_THE_LOAD = (Overloaded, DeadlinePassed)
"""Failures that say that there was too much to do: no room, and no end in time."""


class Brake:
    """Ends a measurement early, once, for a reason."""

    def __init__(self, give_up: int = GIVE_UP) -> None:
        """`give_up`: see `GIVE_UP`."""
        self.why = ""
        """In words; empty: not pulled."""
        self._give_up = give_up
        self._in_a_row = 0
        self._pulled = asyncio.Event()

    @property
    def pulled(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._pulled.is_set()

    def pull(self, why: str) -> None:
        """Ends it; safe twice, the first reason stays."""
        self.why = self.why or why
        self._pulled.set()

    async def wait(self) -> None:
        """Returns when it is pulled."""
        await self._pulled.wait()

    def ended(self, error: PdserveError | None) -> None:
        """Takes note of one request's end. A refusal for want of room is an answer: the endpoint is there.

        A missed deadline counts where the loop is closed: it would wait for every other one too. An open loop has sent
        all by then; whether the endpoint is there is asked when the run is over.
        """
        if error is None or isinstance(error, Overloaded):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == self._give_up:
            last = failure(error)
            self.pull(f"{self._in_a_row} requests in a row failed, the last with {last.reason}: {last.message}")


class Watch(Protocol):
    """Is told how a run goes on; must not take long, for it runs between stamps."""

    def sent(self) -> None:
        """A request went out."""
        ...

    def ended(self, record: Record) -> None:
        """A request is over."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one run."""

    records: tuple[Record, ...]
    """Of what was sent, by index."""
    duration: float
    """The run's start to the end of its last request, seconds."""
    broke_off: bool
    """Not everything was sent, or what was sent was not waited for."""
    fault: Failure | None = None
    """The first failure that is not one of the load; None: there was none."""


class Runner:
    """Runs loads against one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        slo: Slo,
        brake: Brake,
        watch: Watch,
        *,
        timeout: float,
        clock: Clock | None = None,
    ) -> None:
        """`timeout`: seconds of one request; `clock`: the running loop's, which is the default."""
        self._endpoint = endpoint
        self._slo = slo
        self._brake = brake
        self._watch = watch
        self._timeout = timeout
        self._clock = clock or asyncio.get_running_loop().time
        self._records: list[Record] = []
        self._fault: Failure | None = None
        self._begun = 0.0

    async def open_loop(
        self, asks: Sequence[Ask], due: Sequence[float], prompt: Callable[[int], str | Sequence[int]]
    ) -> Ran:
        """Sends each request at its time in `due`, seconds from now.

        A prompt is made and encoded before its request is due. Where that takes longer than the gap, the request is
        late, and its record says so.
        """
        self._start()
        tasks: list[asyncio.Task[None]] = []
        try:
            for ask, at in zip(asks, due, strict=True):
                send = self._endpoint.prepare(prompt(ask.index), ask.output_tokens)
                await self._until(self._begun + at)
                if self._brake.pulled:
                    break
                tasks.append(asyncio.create_task(self._one(ask, at, send, ends=True), name=f"request {ask.index}"))
            await self._all(tasks)
        finally:
            await _end(tasks)
        return self._ran(len(asks))

    async def closed_loop(
        self, asks: Sequence[Ask], in_flight: int, prompt: Callable[[int], str | Sequence[int]]
    ) -> Ran:
        """Keeps `in_flight` requests under way until all are sent; due is when a place was free."""
        self._start()
        left = iter(asks)
        tasks = [
            asyncio.create_task(self._place(left, prompt), name=f"place {number}")
            for number in range(min(in_flight, len(asks)))
        ]
        try:
            await self._all(tasks)
        finally:
            await _end(tasks)
        return self._ran(len(asks))

    async def _place(self, left: Iterator[Ask], prompt: Callable[[int], str | Sequence[int]]) -> None:
        for ask in left:
            if self._brake.pulled:
                return
            due = self._clock() - self._begun
            await self._one(ask, due, self._endpoint.prepare(prompt(ask.index), ask.output_tokens), ends=False)

    async def _one(self, ask: Ask, due: float, send: Send, *, ends: bool) -> None:
        """Sends it; `ends`: the run ends in time though no request does, so that a deadline need not end it."""
        trail = Trail()
        outcome: Outcome | None = None
        error: PdserveError | None = None
        self._watch.sent()
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await send(trail)
            if not trail.chunks:
                error = PdserveError("the answer has no token", reason="NO_TOKEN")
        except TimeoutError:
            error = DeadlinePassed(f"no end within {self._timeout:g} s")
        except PdserveError as caught:
            error = caught
        except asyncio.CancelledError:
            if not self._brake.pulled:
                raise
            error = RequestCancelled("the measurement was broken off")
        record = make_record(ask, due, self._begun, trail, outcome, error, self._slo)
        self._records.append(record)
        if self._fault is None and not isinstance(error, OF_THE_LOAD):
            self._fault = record.error
        self._watch.ended(record)
        if not self._brake.pulled:
            self._brake.ended(None if ends and isinstance(error, DeadlinePassed) else error)

    def _start(self) -> None:
        self._records = []
        self._fault = None
        self._begun = self._clock()

    async def _until(self, when: float) -> None:
        """Returns at `when`, or at once if that is over, or when the brake is pulled."""
        delay = when - self._clock()
        if delay <= 0:
            await asyncio.sleep(0)  # what was sent before gets its turn
            return
        try:
            async with asyncio.timeout(delay):
                await self._brake.wait()
        except TimeoutError:
            return

    async def _all(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Waits for all, or for the brake; what a task raises is raised."""
        if not tasks:
            return
        together: asyncio.Future[list[None]] = asyncio.gather(*tasks)
        brake = asyncio.create_task(self._brake.wait())
        waited: set[asyncio.Future[Any]] = {together, brake}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if together.done():
                together.result()
                return
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(together, return_exceptions=True)
        finally:
            brake.cancel()
            await asyncio.gather(brake, return_exceptions=True)

    def _ran(self, asked: int) -> Ran:
        records = sorted(self._records, key=lambda record: record.index)
        duration = self._clock() - self._begun
        cancelled = any(record.error and record.error.reason == RequestCancelled.reason for record in records)
        broke_off = self._brake.pulled and (cancelled or len(records) < asked)
        return Ran(tuple(records), duration, broke_off, self._fault)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Nothing is left running, however a run ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
