"""What is made once for all who ask, and processes that are being started."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pdserve.kvd.transport.child import Child

K = TypeVar("K")
T = TypeVar("T")
C = TypeVar("C", bound=Child)


class Once(dict[K, "asyncio.Task[T]"]):
    """What is made once for all who ask; a failure is not kept."""

    async def get_or(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The one of a key. Whoever gives up waiting stops nobody else."""
        task = self.get(key)
        if task is None:
            task = self[key] = asyncio.create_task(make())
            task.add_done_callback(lambda made: self._made(key, made))
        return await asyncio.shield(task)

    def _made(self, key: K, task: "asyncio.Task[T]") -> None:
        if (task.cancelled() or task.exception() is not None) and self.get(key) is task:
            del self[key]


def runs(starting: "asyncio.Task[C]") -> bool:
    """Whether a process has started and can still be asked something."""
    started = starting.done() and not starting.cancelled() and starting.exception() is None
    return started and starting.result().running


async def end(starting: "asyncio.Task[C]") -> None:
    """Ends a process, also one that is being started."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end("nothing needs it any more")
        await starting.result().gone()
