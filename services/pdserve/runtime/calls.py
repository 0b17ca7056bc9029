"""The open calls of a service: each call's work is a task that is owned here.

A gRPC handler is torn down by its caller at any moment; work that must give blocks back cannot live
in it. The work runs beside it, is cancelled once when the call ends, and may clean up after that.
`drain` waits for the work, not only for the calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol, TypeVar

import structlog

from pdserve.rpc.errors import Draining

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Call(Protocol):
    """What is needed of a grpc.aio.ServicerContext."""

    def add_done_callback(self, callback: Any, /) -> None:
        """Calls back when the call has ended, for whatever reason."""
        ...


class Calls:
    """Owns the work of a service's open calls."""

    def __init__(self) -> None:
        self._work: set[asyncio.Task[None]] = set()
        self._stopped: set[asyncio.Task[None]] = set()
        self._open: set[Call] = set()
        self._no_work = asyncio.Event()
        self._no_work.set()
        self._no_call = asyncio.Event()
        self._no_call.set()
        self.draining = False

    def __len__(self) -> int:
        """Calls whose work has not ended."""
        return len(self._work)

    def check_open(self) -> None:
        """For work to call before it begins; work that is refused may have something to give back.

        Raises:
            Draining: the service takes nothing new.
        """
        if self.draining:
            raise Draining("this service is draining; try another")

    async def stream(self, call: Call, work: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """Yields what `work` yields and raises what it raises; ends `work` with the call.

        What the caller has not read yet waits here: at most one request's answer.

        Raises:
            Draining: the service was stopped under the call.
        """
        events: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
        task = asyncio.create_task(_pump(work, events), name="call")
        self._work.add(task)
        self._open.add(call)
        self._no_work.clear()
        self._no_call.clear()
        task.add_done_callback(lambda _: events.put_nowait(None))
        task.add_done_callback(self._ended)
        # gRPC may drop this generator without closing it: the end of the call is the sure sign.
        call.add_done_callback(lambda _: self._left(call, task))
        try:
            while (event := await events.get()) is not None:
                yield event[0]
        finally:
            self._stop(task)
        if task.cancelled():
            raise Draining("this service was stopped under the call")
        task.result()

    async def idle(self) -> None:
        """Waits until no work is left; the caller bounds it."""
        await self._no_work.wait()

    async def drain(self) -> None:
        """Takes nothing new and waits for the work that there is, and until its callers have all of it;
        the caller bounds it."""
        self.draining = True
        await self._no_work.wait()
        await self._no_call.wait()

    async def aclose(self, timeout: float = 5.0) -> None:
        """Stops what is open and waits at most `timeout` seconds for it to clean up; safe twice.

        The calls end with Draining; whoever closes the server leaves them a moment to say so.
        """
        self.draining = True
        for task in tuple(self._work):
            self._stop(task)
        try:
            await asyncio.wait_for(self._no_work.wait(), timeout)
        except TimeoutError:
            log.error("calls_left", open=len(self._work), timeout=timeout)

    def _left(self, call: Call, task: asyncio.Task[None]) -> None:
        self._open.discard(call)
        if not self._open:
            self._no_call.set()
        self._stop(task)

    def _stop(self, task: asyncio.Task[None]) -> None:
        # Once: a second cancellation would cut the cleaning up short.
        if task in self._work and task not in self._stopped:
            self._stopped.add(task)
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        self._stopped.discard(task)
        if not self._work:
            self._no_work.set()
        # `stream` raises it to a caller that is still there; here it is said for one that is not.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("call_failed", error=repr(error))


async def _pump(work: AsyncGenerator[T, None], events: asyncio.Queue[tuple[T] | None]) -> None:
    async with contextlib.aclosing(work):
        async for item in work:
            events.put_nowait((item,))
