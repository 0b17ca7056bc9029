"""Reads over MORI-IO: between nodes by RDMA, of host and of device memory, and between a node's GPUs by XGMI.

MORI lives in processes of its own (mori_process; `far` has which): one that serves, once a card was asked for, and one
that reads, while there are sessions; so a node of engines that only prefill, or only decode, has one. Not one for both:
a read that must end, ends with its process, and a process that others read from would take their reads along, and those
their processes.

Device memory is opened by its IPC handles in both, and registered there: placement 1. Whether a device's driver
registers memory of another process is not known beforehand, and where it does not, the process may abort: so it is
tried with the first region of each device (mori_trial). Where that fails, MORI lives in the process of the rank that
has the memory, if the rank offers that (mori_placement): placement 2. Its region is then served, and read into, by
engines there (mori_hosted), and by no process of kvd's. Else the region is refused.
"""

import asyncio
import importlib.util
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from pdserve.kvd.config import MoriBackend, MoriConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.far import FarTransport
from pdserve.kvd.transport.mori_devices import KIND
from pdserve.kvd.transport.mori_hosted import MoriHosted
from pdserve.kvd.transport.mori_placement import Choice, Placement, Tried, place, wants_own
from pdserve.kvd.transport.mori_process import Library, MoriProcess, Parts
from pdserve.kvd.transport.mori_reader import MoriReader
from pdserve.kvd.transport.mori_trial import try_foreign, try_own
from pdserve.kvd.transport.mori_wire import read_card, write_card
from pdserve.kvd.transport.once import Once, runs
from pdserve.kvd.transport.port import Capabilities, MappedRegion, RemoteRegion
from pdserve.kvd.transport.rank_host import RankHost
from pdserve.kvd.transport.serving import Serving
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey
from pdserve.rpc.errors import ConfigError, InvalidRequest, TransferFailed

log = structlog.get_logger(__name__)

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
        raise ConfigError("the transport mori is not installed: it comes with the extra `mori`")


@dataclass(frozen=True, slots=True)
class Hosted:
    """A region whose engines are in its rank's process."""

    host: RankHost
    start: Callable[[str], Coroutine[Any, Any, MoriProcess]]
    """An engine there, by what it is for."""
    serving: Serving[MoriProcess, Parts]


class MoriTransport(FarTransport[MoriProcess, Parts, MoriReader]):
    """See the module; port.Reaching, rank_host.TakesHosts."""

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
        self._offers: dict[RegionKey, RankHost] = {}
        self._hosted: dict[RegionKey, Hosted] = {}
        self._chosen: dict[str, Placement | None] = {}
        """By PCI bus id: what was chosen last, and has been told."""

    def offered(self, key: RegionKey, host: RankHost) -> None:
        """See rank_host.TakesHosts."""
        if key in self._offers:
            self._offers.pop(key).close()
        self._offers[key] = host

    def registered_by(self, key: RegionKey) -> str:
        """See rank_host.TakesHosts."""
        if key not in self._taken:
            return ""
        placement = Placement.WORKER if key in self._hosted else Placement.CHILDREN
        return placement.value

    async def take(self, region: MappedRegion, memory: DeviceMemory) -> None:
        """See port.TakesDevices."""
        host = self._offers.pop(region.key, None)
        try:
            if memory.events:
                raise InvalidRequest("mori takes no device memory with events: a layer is announced when it is there")
            size = sum(piece.size for piece in memory.pieces)
            if size != region.size or region.key in self._taken:
                raise InvalidRequest(f"a region of {region.size} bytes in pieces of {size}, or one that is mapped")
            choice = await self._choose(memory, hosts=host is not None)
            if choice.placement is None:
                raise InvalidRequest(f"memory of the device {memory.bus_id}: {choice.why}")
            if region.key in self._taken:
                raise InvalidRequest("a region that was mapped meanwhile")
            if choice.placement is Placement.WORKER:
                assert host is not None
                self._hosted[region.key] = self._host(host)
                host = None
            self._taken[region.key] = memory
        finally:
            if host is not None:
                host.close()

    async def give_back(self, region: MappedRegion) -> None:
        """See port.TakesDevices."""
        if self._taken.pop(region.key, None) is None:
            return
        try:
            await self.forget(region)
        finally:
            hosted = self._hosted.pop(region.key, None)
            if hosted is not None:
                await hosted.serving.aclose()
                hosted.host.close()

    def announced(self, key: RegionKey, step: int, layer: int | None) -> None:
        """See port.TakesDevices: of a region without events, what is announced is there."""

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""
        card = read_card(src.card, self._backend, src.size)
        hosted = self._hosted.get(dst.key)
        name = "all" if hosted is None else str(dst.key)
        reader = self._readers.get(
            name, lambda: MoriReader(self._start("reads") if hosted is None else hosted.start("reads"), self._map)
        )
        return await self._readers.session(name, reader, card, (f"{card.name} {src.key}", 0), (src, dst))

    def processes(self) -> list[MoriProcess]:
        """See FarTransport; those in ranks' processes too."""
        hosted = [task.result() for one in self._hosted.values() for task in one.serving.starting if runs(task)]
        return [*super().processes(), *hosted]

    async def aclose(self) -> None:
        """See port.Transport."""
        for trying in self._tried.values():
            trying.cancel()
        await asyncio.gather(*self._tried.values(), return_exceptions=True)
        await super().aclose()
        for hosted in self._hosted.values():
            await hosted.serving.aclose()
            hosted.host.close()
        self._hosted.clear()

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

    def _serves(self, region: MappedRegion) -> Serving[MoriProcess, Parts]:
        hosted = self._hosted.get(region.key)
        return super()._serves(region) if hosted is None else hosted.serving

    def _host(self, host: RankHost) -> Hosted:
        library = replace(self._library, start=host.start)

        def start(role: str) -> Coroutine[Any, Any, MoriProcess]:
            return MoriHosted.start(self._name(role), self._config, library, {})

        return Hosted(host, start, Serving(lambda: start("serves"), self._map))

    async def _choose(self, memory: DeviceMemory, *, hosts: bool) -> Choice:
        foreign = own = ""
        backend, bus_id = self._config.backend, memory.bus_id
        try:
            await self._tried.get_or(bus_id, lambda: try_foreign(self._tries, memory))
        except TransferFailed as error:
            foreign = error.message
        if wants_own(backend, foreign, hosts=hosts):
            try:
                await try_own(self._tries, bus_id)
            except TransferFailed as error:
                own = error.message
        choice = place(backend, Tried(foreign, own), hosts=hosts)
        if bus_id not in self._chosen or self._chosen[bus_id] is not choice.placement:
            self._chosen[bus_id] = choice.placement
            where = "nowhere" if choice.placement is None else choice.placement.value
            log.info("mori_placed", device=bus_id, engines=where, why=choice.why)
        return choice

    def _tries(self) -> Coroutine[Any, Any, MoriProcess]:
        return self._start("tries")
