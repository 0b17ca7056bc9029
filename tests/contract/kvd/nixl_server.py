"""A daemon's serving half as a process: prints its nixl process's id and the card of a region of sevens."""

import asyncio
import os
import sys

import numpy as np

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import MemoryKind, RegionKey


async def main(size: int) -> None:
    """Until its input ends."""
    arena = Arena([1 << 32])
    fd = os.memfd_create("far")
    os.ftruncate(fd, size)
    region = MappedRegion(RegionKey("far", 0), MemoryKind.HOST, size, arena.map(fd, size))
    np.frombuffer(arena.view(region.offset, size), np.uint8)[:] = 7
    transport = NixlTransport(arena, NixlConfig(tls="tcp"))
    card = await transport.card(region)
    print(transport.processes()[0].pid, card.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()


asyncio.run(main(int(sys.argv[1])))
