"""What the reading process of mori is told when sessions come and go, in which order. The process only listens."""

import asyncio
from typing import Any, cast

from pdserve.kvd.transport.mori_process import MoriProcess
from pdserve.kvd.transport.mori_reader import MoriReader
from pdserve.kvd.transport.mori_wire import Card
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.types import MemoryKind, RegionKey


class Listener:
    """A process that writes down what it is told, and answers when it is let."""

    running = True
    failure = ""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.maps = asyncio.Event()

    async def _told(self, what: str) -> tuple[()]:
        self.told.append(what)
        await self.answers.wait()
        return ()

    async def map(self, region: MappedRegion) -> Any:
        """As MapRegion."""
        self.maps.set()
        return await self._told(f"map {region.key.engine_id}")

    async def reach(self, peer: str, region: str, engine: bytes, memory: Any) -> None:
        """See MoriProcess."""
        await self._told(f"reach {peer}")

    async def leave(self, peer: str, region: str) -> None:
        """See MoriProcess."""
        await self._told(f"leave {peer}")

    async def unmap(self, region: str) -> None:
        """See Child."""
        await self._told("unmap")

    def end(self, reason: str) -> None:
        """See Child."""

    async def gone(self) -> None:
        """See Child."""


async def test_who_joins_while_the_last_one_leaves_a_region_maps_it_after_that() -> None:
    """The region's end is told before any answer is waited for, so none that comes later takes away what is new."""
    process = Listener()

    async def start() -> MoriProcess:
        return cast("MoriProcess", process)

    reader = MoriReader(start(), lambda _, region: process.map(region))
    card = Card("pdserve.mori.1", "a", "rdma", 4096, b"", ())
    dst, other = (MappedRegion(RegionKey(name, 0), MemoryKind.HOST, 4096, 0) for name in "do")
    await reader.join("a", card, dst)
    await reader.join("b", card, other)  # keeps the process
    process.told.clear()
    process.maps.clear()
    process.answers.clear()
    leaving = asyncio.create_task(reader.leave("a", dst.key))
    await asyncio.sleep(0)
    joining = asyncio.create_task(reader.join("b", card, dst))
    await asyncio.wait_for(process.maps.wait(), 5)
    process.answers.set()
    await asyncio.gather(leaving, joining)
    assert process.told == ["leave a", "unmap", "map d", "reach b"]
    await reader.aclose()
