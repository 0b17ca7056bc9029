"""The process of a library that serves what other nodes read."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.once import Once, end, runs
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import RegionKey

C = TypeVar("C", bound=Child)
M = TypeVar("M")


class Serving(Generic[C, M]):
    """Started with the first region that is to be read, and again where it has ended; registers each region once."""

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, C]],
        map_region: Callable[[C, MappedRegion], Coroutine[Any, Any, M]],
    ) -> None:
        """`map_region` registers a region with a process; what that knows it by."""
        self._start = start
        self._map_region = map_region
        self._starting: asyncio.Task[C] | None = None
        self._registered: Once[RegionKey, M] = Once()

    async def registered(self, region: MappedRegion) -> tuple[C, M]:
        """The process that serves a region, and what it knows it by.

        Raises:
            TransferFailed: it does not start, or cannot register the region.
        """
        if self._starting is None or (self._starting.done() and not runs(self._starting)):
            self._registered = Once()
            self._starting = asyncio.create_task(self._start())
        process = await asyncio.shield(self._starting)
        return process, await self._registered.get_or(region.key, lambda: self._map_region(process, region))

    async def forget(self, region: MappedRegion) -> None:
        """Takes a registration back, also one that is being made. Safe twice.

        Raises:
            TransferFailed: the process ended meanwhile, or the library would not.
        """
        registered = self._registered.pop(region.key, None)
        if registered is None:
            return
        await asyncio.wait([registered])
        if self._starting is not None and runs(self._starting):
            await self._starting.result().unmap(str(region.key))

    @property
    def starting(self) -> "list[asyncio.Task[C]]":
        """The process, where one was started."""
        return [] if self._starting is None else [self._starting]

    async def aclose(self) -> None:
        """Ends the process."""
        for process in self.starting:
            await end(process)
