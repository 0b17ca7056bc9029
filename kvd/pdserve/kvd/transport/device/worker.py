"""A device and the one thread that drives it."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import structlog

from pdserve.kvd.transport.device.mappings import Mappings
from pdserve.kvd.transport.device.port import Device

log = structlog.get_logger(__name__)

T = TypeVar("T")


class DeviceWorker:
    """See the module. `mappings` and `device` are touched in the thread only, but for launches while it is idle."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mappings = Mappings(device)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvd-gpu")
        self._undoing: set[asyncio.Task[None]] = set()
        self._given = 0
        """Calls that the thread has, as far as the loop knows."""

    @property
    def idle(self) -> bool:
        """The thread has nothing to do: until it is given something, the loop may launch in its place."""
        return not self._given

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Runs it in the thread, behind what was submitted before."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._given += 1
        future.add_done_callback(self._over)
        return future

    async def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """The same, to its end; undone where the caller is cancelled meanwhile, which waits for nothing."""
        future = self.submit(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._undo(future, undo))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)
            raise

    async def aclose(self) -> None:
        """Waits for what was submitted, and ends the thread."""
        while self._undoing:
            await asyncio.wait(self._undoing)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _over(self, _: "asyncio.Future[T]") -> None:
        self._given -= 1

    async def _undo(self, future: "asyncio.Future[T]", undo: Callable[[T], object]) -> None:
        await asyncio.wait([future])
        if (error := future.exception()) is not None:
            log.warning("device_call_failed", device=self.device.bus_id, error=str(error))
            return
        await self.submit(lambda: undo(future.result()))
