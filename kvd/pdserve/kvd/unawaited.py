"""What nobody waits for: tasks that run on by themselves, and the errors that only a defect of kvd explains."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator

import structlog

from pdserve.rpc.errors import PdserveError

log = structlog.get_logger(__name__)


class Unawaited:
    """Owns the tasks, and counts the defects."""

    def __init__(self) -> None:
        self.defects = 0
        """Such as books that do not add up; 0 in a good daemon."""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around what nobody waits for: a defect of kvd is logged and counted, and the daemon goes on.
        What a caller can be told (PdserveError) passes through."""
        try:
            yield
        except PdserveError:
            raise
        except Exception as error:  # noqa: BLE001  # counted and logged, and the loop goes on
            self.defect(error)

    def defect(self, error: BaseException) -> None:
        """Logs and counts an error that only a defect of kvd explains."""
        self.defects += 1
        log.error("kvd_defect", exc_info=error)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs `work`, which ends by itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def aclose(self) -> None:
        """Waits for the tasks that there are, and those that they begin."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with self.watched():
            task.result()
