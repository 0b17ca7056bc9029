"""The process that reads from one peer, and what it knows: the peer's regions, and ours that it writes.

Shared by the sessions with that peer, and ended with the last of them.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pdserve.kvd.transport.nixl_process import Mapped, NixlProcess
from pdserve.kvd.transport.nixl_wire import Card
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import TransferFailed

K = TypeVar("K")
T = TypeVar("T")

MapRegion = Callable[[NixlProcess, MappedRegion], Awaitable[Mapped]]


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


class Link:
    """See the module."""

    def __init__(self, start: Coroutine[Any, Any, NixlProcess], map_region: MapRegion) -> None:
        self.starting = asyncio.create_task(start)
        """Its process."""
        self._map_region = map_region
        self._known: list[Card] = []
        self._loads: Once[int, None] = Once()
        """By the address of a peer's region."""
        self._mapped: Once[RegionKey, Mapped] = Once()
        self._sessions: Counter[RegionKey] = Counter()
        """By the region that they write."""

    @property
    def over(self) -> bool:
        """Its process has failed, or was never there."""
        return self.starting.done() and not runs(self.starting)

    @property
    def unused(self) -> bool:
        """No session has it, or is about to."""
        return not self._sessions

    def fits(self, card: Card) -> bool:
        """Whether it knows no other memory of the peer where this lies: nixl forgets a peer only as a whole."""
        return not any(card != other and _overlap(card, other) for other in self._known)

    async def join(self, card: Card, dst: MappedRegion) -> NixlProcess:
        """For a new session, which leaves it again, also where this fails.

        Raises:
            TransferFailed: the process, the peer's memory or ours is not to be had.
        """
        self._sessions[dst.key] += 1
        if card not in self._known:
            self._known.append(card)
        process = await asyncio.shield(self.starting)
        await self._loads.get_or(card.address, lambda: process.load(card.metadata))
        await self._mapped.get_or(dst.key, lambda: self._map(process, dst))
        return process

    async def leave(self, dst: RegionKey) -> None:
        """A session is over; its copies are terminal."""
        self._sessions[dst] -= 1
        if self._sessions[dst]:
            return
        del self._sessions[dst]
        mapped = self._mapped.pop(dst, None)
        if self.unused:
            await end(self.starting)
        elif mapped is not None and runs(self.starting):
            with contextlib.suppress(TransferFailed):  # it has ended: nothing is mapped any more
                await self.starting.result().unmap(str(dst))

    async def aclose(self) -> None:
        """Ends the process."""
        await end(self.starting)

    async def _map(self, process: NixlProcess, region: MappedRegion) -> Mapped:
        return await self._map_region(process, region)


def _overlap(a: Card, b: Card) -> bool:
    return a.address < b.address + b.size and b.address < a.address + a.size


def runs(starting: "asyncio.Task[NixlProcess]") -> bool:
    """Whether a process has started and can still be asked something."""
    started = starting.done() and not starting.cancelled() and starting.exception() is None
    return started and starting.result().running


async def end(starting: "asyncio.Task[NixlProcess]") -> None:
    """Ends a process, also one that is being started."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end("nothing needs it any more")
        await starting.result().gone()
