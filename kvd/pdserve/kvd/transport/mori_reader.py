"""The process that reads from other nodes, and the ways in it: each from what a peer has to a region of ours.

Shared by all sessions with other nodes, and ended with the last of them. One that retires is replaced for new sessions
and kept until its own are closed.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pdserve.kvd.transport.mori_process import MoriProcess, Parts
from pdserve.kvd.transport.mori_wire import Card
from pdserve.kvd.transport.once import Once
from pdserve.kvd.transport.port import MappedRegion
from pdserve.kvd.transport.reading import Reader
from pdserve.kvd.types import RegionKey


class MoriReader(Reader[MoriProcess, Parts, Card]):
    """See the module."""

    def __init__(
        self,
        start: Coroutine[Any, Any, MoriProcess],
        map_region: Callable[[MoriProcess, MappedRegion], Coroutine[Any, Any, Parts]],
    ) -> None:
        super().__init__(start, map_region)
        self._ways: Once[tuple[str, RegionKey], None] = Once()

    async def _meet(self, process: MoriProcess, peer: str, card: Card, dst: MappedRegion) -> None:
        await self._ways.get_or((peer, dst.key), lambda: process.reach(peer, str(dst.key), card.engine, card.memory))

    def _part(self, process: MoriProcess, peer: str, dst: RegionKey) -> Sequence[Coroutine[Any, Any, None]]:
        known = self._ways.pop((peer, dst), None)
        return () if known is None else [process.leave(peer, str(dst))]
