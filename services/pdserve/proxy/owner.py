"""Tasks that may outlive the request that began them, owned by one place that awaits them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Owner:
    """Starts tasks, says when one failed in a way nobody foresaw, and awaits all at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Tasks that run."""
        return len(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which handles its own errors and ends by itself."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._ended)

    async def idle(self) -> None:
        """Waits until none runs; the caller bounds the wait."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """Cancels what runs and awaits it; safe twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)
