"""Reads over MORI-IO: between nodes by RDMA, of host and of device memory, and between a node's GPUs by XGMI.

MORI lives in processes of its own (mori_process; `far` has which): one that serves, once a card was asked for, and one
that reads, while there are sessions; so a node of engines that only prefill, or only decode, has one. Not one for both:
a read that must end, ends with its process, and a process that others read from would take their reads along, and those
their processes.

Device memory is opened by its IPC handles in both, and registered there. Whether a device's driver registers memory of
another process is not known beforehand, and where it does not, the process may abort: so it is tried with the first
region of each device, in two processes that are there for that alone. Where it fails the region is refused.
"""

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from typing import Final

from pdserve.kvd.config import MoriBackend, MoriConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.far import FarTransport
from pdserve.kvd.transport.mori_devices import KIND
from pdserve.kvd.transport.mori_process import Library, MoriProcess, Parts
from pdserve.kvd.transport.mori_reader import MoriReader
from pdserve.kvd.transport.mori_wire import read_card, write_card
from pdserve.kvd.transport.once import Once, end
from pdserve.kvd.transport.port import Capabilities, MappedRegion, RemoteRegion
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError, InvalidRequest, TransferFailed

MORI: Final = Library()
_CAPABILITIES: Final = {
    MoriBackend.RDMA: Capabilities("mori", frozenset({MemoryKind.HOST, KIND}), same_node=True, other_node=True),
    MoriBackend.XGMI: Capabilities("mori", frozenset({KIND}), same_node=True),
}


def check_installed(library: Library) -> None:
    """Raises ConfigError where mori is not installed. That it can work here is seen when its process starts."""
    try:
        found = importlib.util.find_spec(library.api.partition(".")[0])
    except ValueError:
        found = None
    if found is None:
        raise ConfigError("the transport mori is not installed: pip install 'pdserve[mori]'")


class MoriTransport(FarTransport[MoriProcess, Parts, MoriReader]):
    """See the module; port.Reaching, port.TakesDevices."""

    def __init__(
        self, arena: Arena, config: MoriConfig, library: Library = MORI, around: Mapping[str, str] = os.environ
    ) -> None:
        """`library`: another one in tests. `around`: the environment of its processes.

        Raises:
            ConfigError: mori is not installed.
        """
        check_installed(library)
        super().__init__(arena)
        self.capabilities: Final = _CAPABILITIES[config.backend]
        self._config = config
        self._library = library
        self._around = around
        self._taken: dict[RegionKey, DeviceMemory] = {}
        self._tried: Once[str, None] = Once()
        """By PCI bus id of a device."""

    async def take(self, region: MappedRegion, memory: DeviceMemory) -> None:
        """See port.TakesDevices."""
        if memory.events:
            raise InvalidRequest("mori takes no device memory with events: a layer is announced when it is there")
        size = sum(piece.size for piece in memory.pieces)
        if size != region.size or region.key in self._taken:
            raise InvalidRequest(f"a region of {region.size} bytes in pieces of {size}, or one that is mapped")
        try:
            await self._tried.get_or(memory.bus_id, lambda: self._try(memory))
        except TransferFailed as error:
            raise InvalidRequest(
                f"mori cannot register an engine's memory in another process, on {memory.bus_id}: {error.message}"
            ) from error
        self._taken[region.key] = memory

    async def give_back(self, region: MappedRegion) -> None:
        """See port.TakesDevices."""
        if self._taken.pop(region.key, None) is not None:
            await self.forget(region)

    def announced(self, key: RegionKey, step: int, layer: int | None) -> None:
        """See port.TakesDevices: of a region without events, what is announced is there."""

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""
        card = read_card(src.card, self._backend, src.size)
        reader = self._readers.get("all", lambda: MoriReader(self._start("reads"), self._map))
        return await self._readers.session("all", reader, card, (f"{card.name} {src.key}", 0), (src, dst))

    async def aclose(self) -> None:
        """See port.Transport."""
        for trying in self._tried.values():
            trying.cancel()
        await asyncio.gather(*self._tried.values(), return_exceptions=True)
        await super().aclose()

    @property
    def _backend(self) -> str:
        return self._config.backend.value

    async def _launched(self, name: str, role: str) -> MoriProcess:
        return await MoriProcess.start(name, self._config, self._library, self._around)

    async def _map(self, process: MoriProcess, region: MappedRegion) -> Parts:
        if region.kind is MemoryKind.HOST:
            return await process.register(str(region.key), self._arena.file(region.offset), region.size)
        memory = self._taken.get(region.key)
        if memory is None:
            raise TransferFailed("the device memory of an engine that has ended")
        return await process.register_device(str(region.key), memory)

    def _card(self, process: MoriProcess, known: Parts, region: MappedRegion) -> bytes:
        return write_card(process.name, self._backend, process.card, known)

    async def _try(self, memory: DeviceMemory) -> None:
        """Registers memory as it would be used, up to a session: then a device has taken it, on both sides. Copies
        nothing. Raises TransferFailed."""
        starting = [asyncio.create_task(self._start("tries")) for _ in range(2)]
        try:
            serving, reading = await asyncio.gather(*starting)
            parts = await serving.register_device("tried", memory)
            await reading.register_device("tried", memory)
            await reading.reach("tried", "tried", serving.card, parts)
        finally:
            for process in starting:
                await end(process)
