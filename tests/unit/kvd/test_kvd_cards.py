"""Cards are made while regions come and go. By hand: the transport."""

import asyncio

from structlog.testing import capture_logs

from pdserve.kvd.peers.cards import Cards
from pdserve.kvd.transport.port import Capabilities, FarSession, MappedRegion, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed

REGIONS = [MappedRegion(RegionKey("P", rank), MemoryKind.HOST, 4096, rank << 12) for rank in (0, 1)]
WAIT_S = 5.0


class HandTransport:
    """See port.Reaching: makes a card when it is let, and will not take the first rank's back."""

    capabilities = Capabilities("hand", frozenset(MemoryKind), same_node=False, other_node=True)

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.asked = asyncio.Event()
        self.registered: list[RegionKey] = []
        self.forgotten: list[RegionKey] = []

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        self.asked.set()
        await self.let.wait()
        self.registered.append(region.key)
        return b"card"

    async def forget(self, region: MappedRegion) -> None:
        """See port.Reaching."""
        self.forgotten.append(region.key)
        if not region.key.rank:
            raise TransferFailed("its process is gone")

    async def open(self, src: MappedRegion, dst: MappedRegion) -> FarSession:
        """See port.Transport."""
        raise NotImplementedError

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> FarSession:
        """See port.Reaching."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """See port.Transport."""


async def test_no_region_is_registered_after_it_was_forgotten() -> None:
    """A card that is under way when its region goes is given up: the region's place may be another engine's next."""
    transport = HandTransport()
    mapped = {region.key: region for region in REGIONS}
    cards = Cards((transport,), lambda: mapped)
    making = asyncio.create_task(cards.of("P"))
    await asyncio.wait_for(transport.asked.wait(), WAIT_S)
    mapped.clear()
    await asyncio.wait_for(cards.forget(REGIONS), WAIT_S)
    transport.let.set()
    assert await asyncio.wait_for(making, WAIT_S) == {REGIONS[0].key: {}, REGIONS[1].key: {}}
    assert not transport.registered


async def test_a_registration_that_is_not_taken_back_keeps_no_memory() -> None:
    """The others are taken back all the same, whoever unmaps them goes on, and the log says why."""
    transport = HandTransport()
    cards = Cards((transport,), dict)
    with capture_logs() as logs:
        await asyncio.wait_for(cards.forget(REGIONS), WAIT_S)
    assert transport.forgotten == [region.key for region in REGIONS]
    (said,) = logs
    assert (said["event"], said["error"]) == ("card_not_taken_back", "its process is gone")
