"""Makes the cards by which other nodes read this node's memory, and takes the registrations back."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from pdserve.kvd.reaching import forget, reaching
from pdserve.kvd.transport.port import MappedRegion, Reaching, Transport
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import PdserveError

log = structlog.get_logger(__name__)


class Cards:
    """See the module. A card is made when a peer needs it first; the transports keep it."""

    def __init__(self, transports: Sequence[Transport], mapped: Callable[[], Mapping[RegionKey, MappedRegion]]) -> None:
        """`mapped` gives the memory that is here."""
        self._reaching = reaching(transports)
        self._mapped = mapped
        self._making: dict[asyncio.Task[bytes], RegionKey] = {}

    async def of(self, engine_id: str) -> dict[RegionKey, dict[str, bytes]]:
        """The cards of each rank that is here, by transport. One that cannot be made is absent, and logged."""
        found: dict[RegionKey, dict[str, bytes]] = {}
        for key in [key for key in self._mapped() if key.engine_id == engine_id]:
            cards = found[key] = {}
            for name, transport in self._reaching.items():
                region = self._mapped().get(key)
                if region is None or region.kind not in transport.capabilities.kinds:
                    continue
                try:
                    made = await self._make(transport, region)
                except PdserveError as error:
                    log.error("no_card", region=str(key), transport=name, error=error.message)
                else:
                    if made is not None:
                        cards[name] = made
        return found

    async def _make(self, transport: Reaching, region: MappedRegion) -> bytes | None:
        """A card; None where the region went meanwhile."""
        task = asyncio.create_task(transport.card(region))
        self._making[task] = region.key
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._making[task]
        return None if task.cancelled() else task.result()

    async def forget(self, regions: Sequence[MappedRegion]) -> None:
        """Takes registrations back, also those under way; the regions' sessions are closed before, and they are
        unmapped after, whatever a transport says."""
        keys = {region.key for region in regions}
        making = [task for task, key in self._making.items() if key in keys]
        for task in making:
            task.cancel()
        if making:
            await asyncio.wait(making)
        for region in regions:
            await forget(self._reaching, region)
