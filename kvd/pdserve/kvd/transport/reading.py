"""The processes of a library that read from other nodes, and the sessions that share them."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.once import Once, end, runs
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import TransferFailed

C = TypeVar("C", bound=Child)
M = TypeVar("M")
K = TypeVar("K")


class Reader(ABC, Generic[C, M, K]):
    """One process, and what it knows: others' memory, and ours that it writes. Ended with the last session that has it.

    Each library's own says how a peer's memory is made known to it (`_meet`), and what is taken back (`_part`).
    """

    def __init__(
        self, start: Coroutine[Any, Any, C], map_region: Callable[[C, MappedRegion], Coroutine[Any, Any, M]]
    ) -> None:
        """`map_region` registers a region of ours with a process."""
        self.starting = asyncio.create_task(start)
        """Its process."""
        self._map_region = map_region
        self._mapped: Once[RegionKey, M] = Once()
        self._sessions: Counter[tuple[str, RegionKey]] = Counter()
        """By what is read and what is written."""
        self._closed = False

    @property
    def over(self) -> bool:
        """It takes no new sessions: its process has failed, is about to end, or was never there."""
        return self._closed or (self.starting.done() and not runs(self.starting))

    @property
    def unused(self) -> bool:
        """No session has it, or is about to."""
        return not self._sessions

    async def join(self, peer: str, card: K, dst: MappedRegion) -> C:
        """For a new session, which leaves it again, also where this fails. `peer`: what is read.

        Raises:
            TransferFailed: the process, the peer's memory or ours is not to be had.
        """
        self._sessions[peer, dst.key] += 1
        process = await asyncio.shield(self.starting)
        await self._mapped.get_or(dst.key, lambda: self._map_region(process, dst))
        await self._meet(process, peer, card, dst)
        return process

    async def leave(self, peer: str, dst: RegionKey) -> None:
        """A session is over; its copies are terminal."""
        self._sessions[peer, dst] -= 1
        if self._sessions[peer, dst]:
            return
        del self._sessions[peer, dst]
        mapped = None if any(other == dst for _, other in self._sessions) else self._mapped.pop(dst, None)
        if self.unused:
            self._closed = True  # before anything is waited for: nobody is to join it meanwhile
            await end(self.starting)
        elif runs(self.starting):
            process = self.starting.result()
            forgetting = [*self._part(process, peer, dst)]
            if mapped is not None:
                forgetting.append(process.unmap(str(dst)))
            # Said before anything is waited for: whoever joins meanwhile maps the region again, after that.
            # TransferFailed: it has ended, and knows nothing any more.
            for failed in await asyncio.gather(*forgetting, return_exceptions=True):
                if failed is not None and not isinstance(failed, TransferFailed):
                    raise failed

    async def aclose(self) -> None:
        """Ends the process."""
        await end(self.starting)

    @abstractmethod
    async def _meet(self, process: C, peer: str, card: K, dst: MappedRegion) -> None:
        """Makes a peer's memory known, once. Raises TransferFailed."""

    @abstractmethod
    def _part(self, process: C, peer: str, dst: RegionKey) -> Sequence[Coroutine[Any, Any, None]]:
        """What the process is told when no session has both any more."""


R = TypeVar("R", bound=Reader[Any, Any, Any])


class Readers(Generic[R]):
    """The reading processes, by name. One that is over, or that does not fit, is replaced for new sessions, and kept
    until its own are closed."""

    def __init__(self) -> None:
        self._present: dict[str, R] = {}
        self._replaced: set[R] = set()

    def get(self, name: str, make: Callable[[], R], fits: Callable[[R], bool] = lambda _: True) -> R:
        """The one of a name, for a new session."""
        reader = self._present.get(name)
        if reader is not None and not reader.over and fits(reader):
            return reader
        if reader is not None:
            self._replaced.add(reader)
        made = self._present[name] = make()
        return made

    async def session(
        self, name: str, reader: R, card: object, peer: tuple[str, int], regions: tuple[RemoteRegion, MappedRegion]
    ) -> ChildSession:
        """A new session. `peer`: see ChildSession. Cancelled, it leaves nothing.

        Raises:
            TransferFailed: as `Reader.join`.
        """
        dst = regions[1]

        async def leave() -> None:
            await reader.leave(peer[0], dst.key)
            if reader.unused:
                self._replaced.discard(reader)
                if self._present.get(name) is reader:
                    del self._present[name]

        try:
            process = await reader.join(peer[0], card, dst)
        except BaseException:
            await leave()
            raise
        return ChildSession(process, peer, regions, leave)

    @property
    def starting(self) -> "list[asyncio.Task[Any]]":
        """Each one's process."""
        return [reader.starting for reader in (*self._present.values(), *self._replaced)]

    async def aclose(self) -> None:
        """Ends all."""
        await asyncio.gather(*(reader.aclose() for reader in (*self._present.values(), *self._replaced)))
