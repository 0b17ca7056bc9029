"""The memory of this node's ranks: taken in from the memory socket, mapped, and given back.

Host memory is mapped here, into the arena; device memory by the first transport that takes its kind.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pdserve.kvd.callers import allowed
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.memory import MemorySocket, check_file
from pdserve.kvd.memory_wire import RegisterRegion
from pdserve.kvd.notices import LayerReady, Notice, StepEnd
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import MappedRegion, TakesDevices, Transport
from pdserve.kvd.transport.rank_host import RankHost, TakesHosts
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import InvalidRequest

log = structlog.get_logger(__name__)

_TAKE_S: Final = 50.0
"""Longest wait for a device to map memory and to be ready for its first copy."""

Told = Callable[[RegionKey], None]


class Regions:
    """Owns the memory socket and what is mapped. The callbacks are called on the loop."""

    def __init__(
        self,
        config: KvdConfig,
        registry: Registry,
        arena: Arena,
        transports: Sequence[Transport],
        *,
        here: Told,
        gone: Told,
        defect: Callable[[BaseException], None],
    ) -> None:
        """`here`: a rank's memory is mapped and in the registry. `gone`: a rank has died."""
        self._registry = registry
        self._arena = arena
        self._devices: dict[MemoryKind, TakesDevices] = {}
        for transport in transports:
            if isinstance(transport, TakesDevices):
                for kind in transport.capabilities.kinds - {MemoryKind.HOST}:
                    self._devices.setdefault(kind, transport)
        self._here = here
        self._users = allowed(config.allow_uid)
        self._socket = MemorySocket(
            config.memory_socket,
            self._register,
            lambda *rank: gone(RegionKey(*rank)),
            config.hello_timeout,
            defect,
            self._users,
        )
        self._mapped: dict[RegionKey, MappedRegion] = {}
        self.mapped: Final[Mapping[RegionKey, MappedRegion]] = self._mapped
        """The memory that is here."""

    def start(self) -> None:
        """Begins to take memory.

        Raises:
            OSError: the socket cannot be bound.
        """
        self._socket.start()

    def announced(self, notice: Notice) -> None:
        """A rank's notice has come, and nothing has been done about it yet."""
        if not self._devices or not isinstance(notice, LayerReady | StepEnd):
            return
        region = self._mapped.get(RegionKey(notice.engine_id, notice.rank))
        if region is not None and region.kind in self._devices:
            layer = notice.layer if isinstance(notice, LayerReady) else None
            self._devices[region.kind].announced(region.key, notice.step, layer)

    def withdraw(self, engine_id: str) -> Sequence[MappedRegion]:
        """Takes an ended engine's regions out of `mapped`, so that nothing begins in them any more; they stay
        mapped until `unmap`."""
        return [self._mapped.pop(key) for key in list(self._mapped) if key.engine_id == engine_id]

    async def unmap(self, engine_id: str, regions: Sequence[MappedRegion]) -> None:
        """Unmaps what was withdrawn, which nothing touches any more, and closes the engine's connections."""
        for region in regions:
            await self._unmap(region)
        self._socket.drop(engine_id)

    async def stop(self) -> None:
        """Takes no more memory; what is mapped stays. Safe twice."""
        await self._socket.stop()

    def close(self) -> None:
        """Closes the socket, after `stop`; whoever sees that knows that nothing of this daemon writes any more. Safe
        twice."""
        self._socket.close()

    async def _register(self, message: RegisterRegion, fds: Sequence[int]) -> None:
        kind = MemoryKind(message.kind)
        key = RegionKey(message.engine_id, message.rank)
        if kind is MemoryKind.HOST:
            region = MappedRegion(key, kind, message.size, self._map(message, fds))
        else:
            region = MappedRegion(key, kind, message.size, 0)
            await self._take(region, message, fds)
        try:
            self._registry.add_region(message.engine_id, message.rank, Region(message.size, kind, message.layout))
        except BaseException:
            await self._unmap(region)
            raise
        self._mapped[key] = region
        log.info("region_mapped", engine_id=key.engine_id, rank=key.rank, bytes=message.size, kind=kind.value)
        self._here(key)

    def _map(self, message: RegisterRegion, fds: Sequence[int]) -> int:
        if len(fds) != 1 or message.device is not None:
            raise InvalidRequest(f"a region of host memory comes with one descriptor, not {len(fds)}, and no device")
        check_file(fds[0], message)
        try:
            return self._arena.map(fds[0], message.size)
        except OSError as error:
            raise InvalidRequest(f"the memory cannot be mapped: {error}") from error

    async def _take(self, region: MappedRegion, message: RegisterRegion, fds: Sequence[int]) -> None:
        transport = self._devices.get(region.kind)
        if transport is None:
            takes = ", ".join(["host", *sorted(kind.value for kind in self._devices)])
            raise InvalidRequest(
                f"this kvd maps {takes} memory, not {region.kind.value}: start it with --transport gpu_ipc"
            )
        if message.device is None or len(fds) > 1:
            raise InvalidRequest(
                "a region of device memory comes with its device, and no descriptor but one for orders"
            )
        if region.key in self._mapped:
            raise InvalidRequest(f"rank {message.rank} of engine {message.engine_id} has registered its memory before")
        try:
            message.layout.check(message.size)
            if fds and isinstance(transport, TakesHosts):
                transport.offered(region.key, RankHost.taken(fds[0], self._users))
            async with asyncio.timeout(_TAKE_S):
                await transport.take(region, message.device)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        except TimeoutError as error:
            raise InvalidRequest(f"the device did not map the memory within {_TAKE_S:g} s") from error

    async def _unmap(self, region: MappedRegion) -> None:
        if region.kind is MemoryKind.HOST:
            self._arena.unmap(region.offset)
        else:
            await self._devices[region.kind].give_back(region)
