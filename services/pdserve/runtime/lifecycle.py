"""The life of a server process: background tasks that may not die unseen, and a two-stage end.

The first SIGTERM or SIGINT drains, bounded by a deadline; the second stops at once.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Self

import structlog

from pdserve.rpc.errors import PdserveError

log = structlog.get_logger(__name__)


class Tasks:
    """Owns a process' background tasks. Each runs until it is closed: one that returns or raises
    makes `failed` raise, so that the process ends loudly instead of limping. Made inside a loop."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._dead: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self._closing = False

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work`, which is meant never to return."""
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    async def failed(self) -> NoReturn:
        """Waits for the first task to end and raises why; for ever where none does.

        Raises:
            PdserveError: what the task raised; a bare one for anything else, and for a plain return.
        """
        await asyncio.shield(self._dead)
        raise AssertionError("unreachable: the future only fails")

    async def aclose(self) -> None:
        """Cancels what runs and waits for it; safe twice."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._dead.done() and not self._dead.cancelled():
            self._dead.exception()  # it was logged; asyncio need not say that nobody asked for it
        self._dead.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._closing:
            return
        name = self._tasks[task]
        if task.cancelled():
            error: BaseException = PdserveError(f"{name} was cancelled")
        else:
            raised = task.exception()
            if isinstance(raised, PdserveError):
                error = raised
            else:
                error = PdserveError(f"{name} ended: {raised!r}" if raised else f"{name} returned")
                error.__cause__ = raised
        if not self._dead.done():
            log.error("task_died", task=name, error=str(error), exc_info=error)
            self._dead.set_exception(error)


class Shutdown:
    """The two stages of an end. `request` once drains, twice stops."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()

    def request(self, cause: str = "request") -> None:
        """The next stage."""
        if self.draining.is_set():
            log.warning("stopping", cause=cause)
            self.stopping.set()
        else:
            log.info("draining", cause=cause, again="stops at once")
            self.draining.set()

    def on_signals(self) -> None:
        """Takes SIGTERM and SIGINT of this process, until the loop closes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number.name)


async def serve_until_shutdown(
    shutdown: Shutdown, failures: Awaitable[NoReturn], drain: Callable[[], Awaitable[None]], deadline: float
) -> None:
    """Returns when the process may close: after a drain, its deadline (seconds) or a second request.

    Raises:
        PdserveError: what `failures` raised, at once, also while draining.
    """
    watch = asyncio.ensure_future(failures)
    try:
        await _first(watch, asyncio.ensure_future(shutdown.draining.wait()))
        work = asyncio.ensure_future(drain())
        done = await _first(watch, work, asyncio.ensure_future(shutdown.stopping.wait()), timeout=deadline)
        if work in done:
            work.result()
            log.info("drained")
        else:
            log.warning("drain_cut_short", deadline=deadline, stopped=shutdown.stopping.is_set())
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _first(
    watch: asyncio.Future[NoReturn], *others: asyncio.Future[Any], timeout: float | None = None
) -> set[asyncio.Future[Any]]:
    """Waits for one of them and cancels the rest, but never `watch`; raises what `watch` raised."""
    try:
        done, _ = await asyncio.wait((watch, *others), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for other in others:
            other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if watch in done:
        watch.result()
    return done
