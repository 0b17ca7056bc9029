"""The n answers of one request, run side by side on the engine and merged into one stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Self

import structlog

from pdserve.engine.port import Engine, Output, Request

log = structlog.get_logger(__name__)


class Fan:
    """Runs requests and yields (index, output) as they come; raises the first error.

    `async with` owns the work: when it is left, every answer that has not ended is aborted and has
    given its blocks back to the engine.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._events: asyncio.Queue[tuple[int, Output] | BaseException | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(requests)

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as long as the answers; what it raises ends them."""
        self._start(work)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """All outputs of all answers; ends with the last answer."""
        while self._open:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                self._open -= 1
            else:
                yield event

    async def __aenter__(self) -> Self:
        for index, request in enumerate(self._requests):
            self._start(self._answer(index, request))
        return self

    async def __aexit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            # One error ends the request; what else went wrong on the way out is said here.
            if isinstance(ended, Exception) and ended is not raised:
                log.warning("answer_failed_too", error=repr(ended))

    async def _answer(self, index: int, request: Request) -> None:
        async with contextlib.aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                self._events.put_nowait((index, output))
        self._events.put_nowait(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(error)
