"""Reads over NIXL (UCX): between nodes, over whatever lanes UCX finds. Host memory.

nixl lives in processes of its own (nixl_process; `far` has which), since UCX ends its process where a peer's end
surprises it, and since only a process's end makes certain that an unfinished read writes nothing more. One serves what
other nodes read, and one reads from each peer: a peer that fails or falls silent takes with it that one; a serving
process that ends takes what others were reading, and the next `card` starts another. kvd itself, and the memory, stay.

Device memory: `capabilities` claims none; `child_wire.Map` would carry an IPC handle where it has a descriptor.
"""

import importlib.util
from typing import Final

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child import Mapped
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.far import FarTransport
from pdserve.kvd.transport.nixl_process import NixlProcess
from pdserve.kvd.transport.nixl_reader import NixlReader
from pdserve.kvd.transport.nixl_wire import read_card, write_card
from pdserve.kvd.transport.port import Capabilities, MappedRegion, RemoteRegion
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError

_BUILDS: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")


def check_installed() -> None:
    """Raises ConfigError where nixl is not installed."""
    if not any(importlib.util.find_spec(build) for build in _BUILDS):
        raise ConfigError("the transport nixl is not installed: it comes with the extra `nixl`")


class NixlTransport(FarTransport[NixlProcess, Mapped, NixlReader]):
    """See the module; port.Reaching."""

    capabilities: Final = Capabilities("nixl", frozenset({MemoryKind.HOST}), same_node=True, other_node=True)

    def __init__(self, arena: Arena, config: NixlConfig) -> None:
        """Raises ConfigError where nixl is not installed."""
        check_installed()
        super().__init__(arena)
        self._config = config

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""
        card = read_card(src.card, src.size)
        reader = self._readers.get(
            card.agent, lambda: NixlReader(self._start("reads"), self._map), lambda one: one.fits(card)
        )
        return await self._readers.session(card.agent, reader, card, (card.agent, card.address), (src, dst))

    async def _launched(self, name: str, role: str) -> NixlProcess:
        return await NixlProcess.start(name, self._config, serves=role == "serves")

    async def _map(self, process: NixlProcess, region: MappedRegion) -> Mapped:
        return await process.map(str(region.key), self._arena.file(region.offset), region.size)

    def _card(self, process: NixlProcess, known: Mapped, region: MappedRegion) -> bytes:
        return write_card(process.name, known.address, region.size, known.metadata)
