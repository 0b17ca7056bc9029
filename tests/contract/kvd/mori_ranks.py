"""mori in ranks' processes, for the suite: ranks whose memory this process sees too, and transports that place their
mori there, since the device registers no memory of other processes.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pdserve.kvd.callers import allowed
from pdserve.kvd.config import MoriConfig
from pdserve.kvd.testing.mori import FAKE
from pdserve.kvd.testing.mori_devices import BEFORE
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child_session import ChildSession
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library
from pdserve.kvd.transport.port import MappedRegion, RemoteRegion
from pdserve.kvd.transport.rank_host import RankHost
from pdserve.kvd.transport.start import Command, Process
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey
from pdserve.rpc.errors import InvalidRequest, TransferFailed
from tests.contract.kvd.far_rig import paint

RANK = "pdserve.kvd.testing.mori_rank"
_ANSWER_S = 20.0


@dataclass
class Rank:
    """A rank's process, and its memory as it is seen here; client.rank.Hosts, of whoever registers it."""

    region: MappedRegion
    memory: DeviceMemory
    process: Process
    to: socket.socket
    orders: int
    """The descriptor that it gave."""

    @classmethod
    async def start(
        cls,
        library: Library,
        env: Mapping[str, str],
        arena: Arena,
        name: str,
        fill: int,
        size: int,
        api: str = FAKE.api,
    ) -> "Rank":
        """One that has offered its memory, to host `api`."""
        file, words = os.memfd_create(name), os.memfd_create("words")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_S)
        try:
            os.ftruncate(file, BEFORE + size)
            at = arena.map(file, BEFORE + size)
            region = MappedRegion(RegionKey(name, 0), MemoryKind.ROCM, size, at + BEFORE)
            paint(arena, region, fill)
            process = await library.start(Command(RANK, (str(size), api), (theirs.fileno(), file), words, env))
            data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1 << 16, 1)
            if not data:
                raise RuntimeError(os.pread(words, 1 << 16, 0).decode())
            return cls(region, msgspec.msgpack.decode(data, type=DeviceMemory), process, ours, fds[0])
        finally:
            theirs.close()
            os.close(file)
            os.close(words)

    def offer(self) -> socket.socket:
        """See client.rank.Hosts: what the process gave."""
        return socket.socket(fileno=os.dup(self.orders))

    def close(self) -> None:
        """See client.rank.Hosts."""

    async def aclose(self) -> None:
        """Ends it."""
        self.to.close()
        os.close(self.orders)
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class Placed(MoriTransport):
    """Takes a rank's memory when it is first needed, as a daemon does when the rank comes."""

    def __init__(
        self, arena: Arena, config: MoriConfig, library: Library, around: Mapping[str, str], rank: Rank
    ) -> None:
        super().__init__(arena, config, library, around)
        self._rank = rank

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        await self._have(region)
        return await super().card(region)

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> ChildSession:
        """See port.Reaching."""
        await self._have(dst)
        return await super().reach(src, dst)

    async def _have(self, region: MappedRegion) -> None:
        assert region == self._rank.region
        if region.key in self._taken:
            return
        self.offered(region.key, RankHost.taken(self._rank.orders, allowed(())))
        try:
            await self.take(region, self._rank.memory)
        except InvalidRequest as error:
            raise TransferFailed(error.message) from error
