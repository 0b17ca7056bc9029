"""Two daemons' transports in one process, and a region of each: for tests of the transports between nodes, whose real
work is done in processes of their own.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.port import MappedRegion, Moved, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey

SIZE = 256 << 20


class Far(Protocol):
    """A transport between nodes with processes of its own."""

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        ...

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""
        ...

    def processes(self) -> Sequence[Child]:
        """Those that run."""
        ...


T = TypeVar("T", bound=Far)


def region(arena: Arena, name: str, fill: int, size: int = SIZE) -> MappedRegion:
    """One rank's memory, every byte the same."""
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, size)
        made = MappedRegion(RegionKey(name, 0), MemoryKind.HOST, size, arena.map(fd, size))
    finally:
        os.close(fd)
    paint(arena, made, fill)
    return made


def paint(arena: Arena, at: MappedRegion, value: int) -> None:
    """Sets every byte."""
    view = arena.view(at.offset, at.size)
    np.frombuffer(view, np.uint8)[:] = value
    view.release()


def count(arena: Arena, at: MappedRegion, value: int) -> int:
    """How many bytes have this value."""
    view = arena.view(at.offset, at.size)
    found = int(np.count_nonzero(np.frombuffer(view, np.uint8) == value))
    view.release()
    return found


def everything(block: int = 64 << 10, size: int = SIZE) -> Runs:
    """The whole region, block by block in an order of its own."""
    order = np.random.default_rng(1).permutation(size // block).astype(np.uint64) * np.uint64(block)
    return Runs(order, order, np.full(len(order), block, np.uint64))


def some(nbytes: int = 4096) -> Runs:
    """The first bytes."""
    return Runs(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.full(1, nbytes, np.uint64))


def readers() -> list[str]:
    """The reading processes of this one that have not ended, as the system knows them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [
                name
                for name in (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if name.startswith(f"reads-{os.getpid()}-")
            ]
    return found


async def until(true: Callable[[], bool]) -> None:
    """Waits for what another process does."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  # of another process there is no event
            await asyncio.sleep(0)


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Nodes(Generic[T]):
    """Two daemons' transports, and a region of each: `src` holds sevens, `dst` zeros."""

    arena: Arena
    producer: T
    consumer: T
    src: MappedRegion
    dst: MappedRegion

    async def described(self) -> RemoteRegion:
        """The source as the other node sees it."""
        return RemoteRegion(self.src.key, self.src.kind, self.src.size, await self.producer.card(self.src))

    async def reach(self) -> ChildSession:
        """A session that has copied before, so that its lanes are up."""
        session = await self.consumer.reach(await self.described(), self.dst)
        await session.start(some()).wait()
        paint(self.arena, self.dst, 0)
        return session

    @property
    def serving(self) -> int:
        """The process id of the producer's serving process."""
        (process,) = self.producer.processes()
        return process.pid

    async def under_way(self) -> None:
        """Waits until a copy of everything has brought its first block."""
        view = self.arena.view(self.dst.offset + int(everything(size=self.dst.size).dst[0]), 1)
        await until(lambda: view[0] == 7)
        view.release()

    async def still(self) -> bool:
        """Whether nothing is written: whatever would be has the time to."""
        before = count(self.arena, self.dst, 7)
        await asyncio.sleep(0.3)
        return count(self.arena, self.dst, 7) == before

    async def reads(self, src: RemoteRegion) -> Moved:
        """Opens a session, copies something, and closes it."""
        session = await self.consumer.reach(src, self.dst)
        try:
            return await asyncio.wait_for(session.start(some()).wait(), 20)
        finally:
            await session.close()
