"""Reads over NIXL (UCX): between nodes, over whatever lanes UCX finds. Host memory.

    this node                                           the other one
    reach ──▶ one nixl process for each peer ──reads──▶ its serving nixl process ◀── card
              (only ever reads)                         (never reads)

nixl lives in processes of its own (nixl_process), since UCX ends its process where a peer's end surprises it, and
since only a process's end makes certain that an unfinished read writes nothing more. A peer that fails or falls
silent takes with it the one process that reads from it; a serving process that ends takes what others were reading,
and the next `card` starts another. kvd itself, and the memory, stay.

Device memory: `capabilities` claims none; `nixl_wire.Map` would carry an IPC handle where it has a descriptor.
"""

import asyncio
import importlib.util
import os
from typing import Final

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl_link import Link, Once, end, runs
from pdserve.kvd.transport.nixl_process import Mapped, NixlProcess
from pdserve.kvd.transport.nixl_wire import Card, read_card, write_card
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved, RemoteRegion
from pdserve.kvd.transport.shm import check_runs
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError, TransferFailed

_BUILDS: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_CLOSE_S: Final = 1.0
"""What the copies of a session that closes have to come to an end, before their process is ended."""


def check_installed() -> None:
    """Raises ConfigError where nixl is not installed."""
    if not any(importlib.util.find_spec(build) for build in _BUILDS):
        raise ConfigError("the transport nixl is not installed: pip install 'pdserve[nixl]'")


class NixlTransport:
    """See the module; port.Reaching."""

    capabilities: Final = Capabilities("nixl", frozenset({MemoryKind.HOST}), same_node=True, other_node=True)

    def __init__(self, arena: Arena, config: NixlConfig) -> None:
        """Raises ConfigError where nixl is not installed."""
        check_installed()
        self._arena = arena
        self._config = config
        self._serving: asyncio.Task[NixlProcess] | None = None
        self._served: Once[RegionKey, Mapped] = Once()
        self._links: dict[str, Link] = {}
        """By the peer's agent; one that is replaced lives until its last session ends."""
        self._replaced: set[Link] = set()
        self._started = 0

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        if self._serving is None or (self._serving.done() and not runs(self._serving)):
            self._served = Once()
            self._serving = asyncio.create_task(self._start("serves"))
        process = await asyncio.shield(self._serving)
        mapped = await self._served.get_or(region.key, lambda: self._map(process, region))
        return write_card(process.name, mapped.address, region.size, mapped.metadata)

    async def forget(self, region: MappedRegion) -> None:
        """See port.Reaching."""
        served = self._served.pop(region.key, None)
        if served is None:
            return
        await asyncio.wait([served])
        if self._serving is not None and runs(self._serving):
            await self._serving.result().unmap(str(region.key))

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "NixlSession":
        """See port.Transport: through this node's own serving process."""
        return await self.reach(RemoteRegion(src.key, src.kind, src.size, await self.card(src)), dst)

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> "NixlSession":
        """See port.Reaching."""
        card = read_card(src.card, src.size)
        link = self._link(card)
        try:
            process = await link.join(card, dst)
        except BaseException:
            await self.leave(card.agent, link, dst.key)
            raise
        return NixlSession(self, link, process, card, src, dst)

    async def leave(self, agent: str, link: Link, dst: RegionKey) -> None:
        """For a session that is over."""
        await link.leave(dst)
        if link.unused:
            self._replaced.discard(link)
            if self._links.get(agent) is link:
                del self._links[agent]

    def processes(self) -> list[NixlProcess]:
        """Those that run, for operators and tests: name, pid, and the lanes of those that have read."""
        starting = [link.starting for link in (*self._links.values(), *self._replaced)]
        if self._serving is not None:
            starting.append(self._serving)
        return [task.result() for task in starting if runs(task)]

    async def aclose(self) -> None:
        """See port.Transport."""
        await asyncio.gather(*(link.aclose() for link in (*self._links.values(), *self._replaced)))
        if self._serving is not None:
            await end(self._serving)

    def _link(self, card: Card) -> Link:
        link = self._links.get(card.agent)
        if link is not None and not link.over and link.fits(card):
            return link
        if link is not None:
            self._replaced.add(link)
        made = self._links[card.agent] = Link(self._start("reads"), self._map)
        return made

    async def _start(self, role: str) -> NixlProcess:
        self._started += 1
        name = f"{role}-{os.getpid()}-{self._started}-{os.urandom(4).hex()}"
        return await NixlProcess.start(name, self._config, serves=role == "serves")

    async def _map(self, process: NixlProcess, region: MappedRegion) -> Mapped:
        return await process.map(str(region.key), self._arena.file(region.offset), region.size)


class NixlSession:
    """See port.FarSession."""

    def __init__(
        self,
        transport: NixlTransport,
        link: Link,
        process: NixlProcess,
        card: Card,
        src: RemoteRegion,
        dst: MappedRegion,
    ) -> None:
        self._transport = transport
        self._link = link
        self._process = process
        self._card = card
        self._src = src
        self._dst = dst
        self._copies: set[NixlCopy] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """See port.FarSession."""
        return self._closing is not None or not self._process.running

    def start(self, runs: Runs) -> "NixlCopy":
        """See port.Session."""
        if self._closing is not None:
            raise TransferFailed("the session is closed")
        check_runs(runs, self._src, self._dst)
        if not runs.total:
            future: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()
            future.set_result(Moved(0, 0))
            return NixlCopy(self._process, 0, future)
        begun = self._process.copy(str(self._dst.key), self._card.agent, self._card.address, runs)
        copy = NixlCopy(self._process, *begun)
        self._copies.add(copy)
        copy.future.add_done_callback(lambda _: self._copies.discard(copy))
        return copy

    async def close(self) -> None:
        """See port.Session."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for copy in self._copies:
            copy.cancel()
        ends = [copy.future for copy in self._copies]
        if ends:
            _, left = await asyncio.wait(ends, timeout=_CLOSE_S)
            if left:
                self._process.end(f"copies of a closed session had not ended after {_CLOSE_S:g} s")
                await asyncio.wait(left)
        await self._transport.leave(self._card.agent, self._link, self._dst.key)


class NixlCopy:
    """See port.Copy."""

    def __init__(self, process: NixlProcess, copy_id: int, future: asyncio.Future[Moved]) -> None:
        self._process = process
        self._copy_id = copy_id
        self.future = future

    def cancel(self) -> None:
        """See port.Copy."""
        self._process.cancel(self._copy_id)

    async def wait(self) -> Moved:
        """See port.Copy."""
        # Shielded: whoever stops waiting does not stop the copy.
        return await asyncio.shield(self.future)
