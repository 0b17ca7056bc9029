"""One measurement or loan at a time, and the tasks of both: ended and awaited when the daemon stops."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pdserve.rpc.errors import Overloaded, PdserveError, Unavailable

T = TypeVar("T")


class Slot:
    """See the module. `defect` is told of errors that only a defect of kvd explains."""

    def __init__(self, defect: Callable[[BaseException], None]) -> None:
        self._defect = defect
        self._task: asyncio.Task[Any] | None = None
        self._doing = ""
        self._closing = False

    def take(self, doing: str, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Begins some work, which has the slot until it is over. `doing`: in words, "measures".

        Raises:
            Overloaded: other work has it.
            Unavailable: the daemon stops.
        """
        if self._closing:
            raise Unavailable("this kvd stops")
        if self._task is not None:
            raise Overloaded(f"this kvd {self._doing}: one measurement at a time")
        task = asyncio.create_task(work())
        self._task, self._doing = task, doing
        task.add_done_callback(self._done)
        return task

    async def aclose(self) -> None:
        """Ends what is under way, and waits until all of its memory was given back. Safe twice."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        while self._task is not None:
            await asyncio.wait([self._task])
            await asyncio.sleep(0)  # its callback, too

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, PdserveError):
            self._defect(error)


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Waits for work that must not be left half done, however often the caller is cancelled meanwhile; it hears of that
    afterwards."""
    task = asyncio.create_task(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return task.result()
