"""What all transports have in common whose library lives in processes of its own and reads from other nodes.

this node                                       the other one
reach ──▶ a process that reads ────reads──────▶ its process that serves ◀── card
          (only ever reads)                     (never reads)
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.once import runs
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion
from pdserve.kvd.transport.reading import Reader, Readers
from pdserve.kvd.transport.serving import Serving

C = TypeVar("C", bound=Child)
M = TypeVar("M")
R = TypeVar("R", bound=Reader[Any, Any, Any])


class FarTransport(ABC, Generic[C, M, R]):
    """port.Reaching, but for what each library says itself: C its process, M what that knows a region by, R its
    readers."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._serving: Serving[C, M] = Serving(lambda: self._start("serves"), self._map)
        self._readers: Readers[R] = Readers()
        self._started = 0

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        process, known = await self._serves(region).registered(region)
        return self._card(process, known, region)

    async def forget(self, region: MappedRegion) -> None:
        """See port.Reaching."""
        await self._serves(region).forget(region)

    async def open(self, src: MappedRegion, dst: MappedRegion) -> ChildSession:
        """See port.Transport: through this node's own serving process."""
        return await self.reach(RemoteRegion(src.key, src.kind, src.size, await self.card(src)), dst)

    @abstractmethod
    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""

    def processes(self) -> list[C]:
        """Those that run, for operators and tests."""
        starting: list[asyncio.Task[C]] = [*self._readers.starting, *self._serving.starting]
        return [task.result() for task in starting if runs(task)]

    async def aclose(self) -> None:
        """See port.Transport."""
        await self._readers.aclose()
        await self._serving.aclose()

    # -- what each library says itself ------------------------------------------------------

    @abstractmethod
    async def _launched(self, name: str, role: str) -> C:
        """A process that is ready; `role`: what it is for. Raises TransferFailed."""

    @abstractmethod
    async def _map(self, process: C, region: MappedRegion) -> M:
        """Registers a region with a process. Raises TransferFailed."""

    @abstractmethod
    def _card(self, process: C, known: M, region: MappedRegion) -> bytes:
        """What another node reads a region by."""

    def _serves(self, region: MappedRegion) -> Serving[C, M]:
        """Who serves a region: one process for all, unless the library says otherwise."""
        return self._serving

    # ---------------------------------------------------------------------------------------

    def _name(self, role: str) -> str:
        """Of a process. Never the same one twice: a peer that sees a name again may take up what it had with who had it
        before."""
        self._started += 1
        return f"{role}-{os.getpid()}-{self._started}-{os.urandom(4).hex()}"

    def _start(self, role: str) -> Coroutine[Any, Any, C]:
        return self._launched(self._name(role), role)
