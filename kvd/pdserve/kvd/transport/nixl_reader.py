"""The process that reads from one peer, and what it knows of that."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pdserve.kvd.transport.child import Mapped
from pdserve.kvd.transport.nixl_process import NixlProcess
from pdserve.kvd.transport.nixl_wire import Card
from pdserve.kvd.transport.once import Once
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.transport.reading import Reader
from pdserve.kvd.types import RegionKey


class NixlReader(Reader[NixlProcess, Mapped, Card]):
    """See the module. Shared by the sessions with that peer; what it knows of it, it knows until its end."""

    def __init__(
        self,
        start: Coroutine[Any, Any, NixlProcess],
        map_region: Callable[[NixlProcess, MappedRegion], Coroutine[Any, Any, Mapped]],
    ) -> None:
        super().__init__(start, map_region)
        self._known: list[Card] = []
        self._loads: Once[int, None] = Once()
        """By the address of a peer's region."""

    def fits(self, card: Card) -> bool:
        """Whether it knows no other memory of the peer where this lies: nixl forgets a peer only as a whole."""
        return not any(card != other and _overlap(card, other) for other in self._known)

    async def join(self, peer: str, card: Card, dst: MappedRegion) -> NixlProcess:
        """See Reader."""
        if card not in self._known:  # before anything is waited for: `fits` is asked for the next session
            self._known.append(card)
        return await super().join(peer, card, dst)

    async def _meet(self, process: NixlProcess, peer: str, card: Card, dst: MappedRegion) -> None:
        await self._loads.get_or(card.address, lambda: process.load(card.metadata))

    def _part(self, process: NixlProcess, peer: str, dst: RegionKey) -> Sequence[Coroutine[Any, Any, None]]:
        return ()


def _overlap(a: Card, b: Card) -> bool:
    return a.address < b.address + b.size and b.address < a.address + a.size
