"""Engines of other nodes that hand over to or from this one, and what was posted to their daemons. Pure but for the
event that whoever needs a card waits for."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.kvd.effects import Post
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.messages import OpEnded, PeerEngine, PeerEngineGone, PostOp, RegionCards
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.transfers import Transfers
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import InvalidRequest, PdserveError, StaleEpoch


@dataclass(frozen=True, slots=True)
class FarRegion:
    """One rank's memory on another node, and how each transport reaches it."""

    key: RegionKey
    region: Region
    cards: Mapping[str, bytes]


class Guests:
    """See the module."""

    def __init__(self, registry: Registry, transfers: Transfers) -> None:
        self._registry = registry
        self._transfers = transfers
        self._links: dict[str, Link] = {}
        self._cards: dict[RegionKey, Mapping[str, bytes]] = {}
        self._posted: dict[int, tuple[Link, str]] = {}
        """Operation -> whom it was posted to, and the engine that it fills."""
        self._news = asyncio.Event()

    def link(self, engine_id: str) -> Link | None:
        """The link to a guest's daemon; None for an engine of this node, or an unknown one."""
        return self._links.get(engine_id)

    def of(self, link: Link) -> list[str]:
        """The guests behind a link."""
        return [engine_id for engine_id, home in self._links.items() if home is link]

    def introduced(self, link: Link, engine: PeerEngine, now: float) -> None:
        """A daemon says what an engine of its own is.

        Raises:
            StaleEpoch: the engine has ended.
            InvalidRequest: it is not an engine of that daemon, or it cannot be what it is said to be.
        """
        if self._links.get(engine.engine_id, link) is not link:
            raise InvalidRequest(f"engine {engine.engine_id} lives on a third node")
        self._registry.guest(engine.engine_id, engine.ranks, engine.identity, engine.regions, link.epoch)
        self._links[engine.engine_id] = link
        self._transfers.regions_changed(engine.engine_id, now)

    def carded(self, link: Link, cards: RegionCards) -> None:
        """A daemon says how to read a rank's memory."""
        if self._links.get(cards.key.engine_id) is link:
            self._cards[cards.key] = cards.cards
            self._news.set()

    async def far(self, key: RegionKey) -> FarRegion:
        """A guest's region, once its card has come; whoever waits is cancelled with the session that it opens.

        Raises:
            StaleEpoch: its engine is gone, or its daemon is.
        """
        while True:
            entry = self._registry.get(key.engine_id)
            if key.engine_id not in self._links or entry is None or entry.ended:
                raise StaleEpoch("the memory of an engine that has ended, or of a node that is gone")
            if key.rank in entry.regions and key in self._cards:
                return FarRegion(key, entry.regions[key.rank], self._cards[key])
            self._news.clear()
            await self._news.wait()

    def stale(self, far: FarRegion) -> None:
        """A card led nowhere: `far` waits for the next one. That comes, since an operation fails for it, on which the
        daemon that posted it sends its cards again (see `Desk`)."""
        if self._cards.get(far.key) is far.cards:
            del self._cards[far.key]

    # -- operations that others carry out ---------------------------------------------------

    def posted(self, post: Post, link: Link) -> PostOp:
        """An operation of this node's book goes to the consumer's daemon."""
        handle = self._transfers.book.ops[post.op_id].consumer.handle
        self._posted[post.op_id] = (link, post.dst.engine_id)
        return PostOp(
            post.op_id,
            post.transfer_id,
            post.src.engine_id,
            post.dst.engine_id,
            handle,
            post.dst.rank,
            post.layers,
            post.src_blocks,
            post.dst_blocks,
            post.src.rank,
            post.first,
        )

    def carrier(self, op_id: int) -> Link | None:
        """Whose it is to carry an operation out; None: this node's."""
        found = self._posted.get(op_id)
        return found[0] if found is not None else None

    def carried_by(self, link: Link) -> int:
        """Operations in flight there."""
        return sum(whose is link for whose, _ in self._posted.values())

    def op_ended(self, link: Link, ended: OpEnded, now: float) -> None:
        """A daemon has carried an operation out; said again where that crossed the wish to end it."""
        if self.carrier(ended.op_id) is not link:
            return
        del self._posted[ended.op_id]
        self._transfers.op_ended(
            ended.op_id,
            now,
            moved=ended.moved,
            ns=ended.ns,
            transport=ended.transport,
            lanes=ended.lanes,
            error=ended.error,
        )

    # -- ends -------------------------------------------------------------------------------

    def gone(self, link: Link, message: PeerEngineGone, now: float) -> None:
        """A guest cannot be heard by its own daemon, or is over; operations in its memory are still answered."""
        if self._links.get(message.engine_id) is not link:
            return
        if message.over:
            self._transfers.engine_ended(message.engine_id, message.detail, now)
            self._news.set()
        else:
            self._transfers.engine_lost(message.engine_id, message.detail, now)

    def lost(self, link: Link, error: PdserveError, now: float) -> None:
        """A daemon is lost, and with it all its guests."""
        for engine_id in self.of(link):
            for op_id in [op_id for op_id, whose in self._posted.items() if whose == (link, engine_id)]:
                del self._posted[op_id]
            self._forget(engine_id)
            self._transfers.guest_lost(engine_id, error.message, now)

    def forgotten(self, engine_id: str) -> None:
        """The core has let a guest go that is over."""
        self._forget(engine_id)

    def _forget(self, engine_id: str) -> None:
        self._links.pop(engine_id, None)
        for key in [key for key in self._cards if key.engine_id == engine_id]:
            del self._cards[key]
        self._news.set()
