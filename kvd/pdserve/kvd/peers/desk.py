"""What passes between this node's core and the daemons of other nodes. Pure: the time is an argument.

    this node's consumer says ──▶ Relay, and on to the producer's daemon        ◀── Told, PostOp, CancelOp, TearDown
    another node's consumer says (Relayed) ──▶ Transfers, as if it were here    ──▶ Told, PostOp, CancelOp, TearDown

The core knows the engines of other nodes as guests: what it wants told or posted to one of them goes over its link.
"""

from collections.abc import Callable, Iterable, Mapping

from pdserve.kvd.client.messages import Accept, Cancel, End, Renew, Retract
from pdserve.kvd.consuming import Source
from pdserve.kvd.effects import CancelOp, Effect, Post, TearDown, Tell, Unmap
from pdserve.kvd.peers.guests import Guests
from pdserve.kvd.peers.hearing import Check, Hearing, note
from pdserve.kvd.peers.link import Link, LinkState
from pdserve.kvd.peers.links import LinkLimits, Links
from pdserve.kvd.peers.messages import (
    Message,
    PeerEngine,
    PeerEngineGone,
    RegionCards,
    Relayed,
    Told,
)
from pdserve.kvd.registry import EngineEntry
from pdserve.kvd.transfers import Transfers
from pdserve.kvd.types import RegionKey
from pdserve.rpc.errors import (
    InvalidRequest,
    Overloaded,
    PdserveError,
    PeerLost,
    StaleEpoch,
    TransferFailed,
)


class Desk:
    """See the module. `links` and `guests` are for reading, and for whoever carries the streams."""

    def __init__(
        self,
        epoch: str,
        transfers: Transfers,
        limits: LinkLimits,
        check: Check,
        jitter: Callable[[], float],
    ) -> None:
        """`epoch` is this daemon's; `jitter` gives numbers from 0 to 1."""
        self.address = ""
        """Where other nodes reach this daemon; empty: it has no peers."""
        self._transfers = transfers
        self._registry = transfers.book.registry
        self._relay = transfers.relay
        self.links = Links(epoch, limits, self._lost, jitter)
        self.guests = Guests(self._registry, transfers)
        self.heard = Hearing(self.links, self.guests, transfers, check, self._again).heard
        """Takes one frame of a stream."""
        self.lost = 0
        """Links that were lost."""
        self._wanting: list[tuple[Link, str]] = []
        """Peers that need the cards of an engine of this node."""
        self._readers: dict[Link, set[str]] = {}
        """The engines of this node that a peer reads from."""

    # -- what engines of this node say ------------------------------------------------------

    def elsewhere(self, source: Source) -> bool:
        """Whether another node's daemon keeps the book of a transfer.

        Raises:
            TransferFailed: it does, and this one has no way to it.
            StaleEpoch: the producer lives elsewhere, and its locator does not say where.
        """
        there = source.kvd_address
        guest = self.guests.link(source.engine_id) is not None
        if not there or there.startswith(("unix:", "/")) or there == self.address:
            if guest:
                raise StaleEpoch(f"engine {source.engine_id} lives on another node, which its locator does not say")
            return False
        if not guest and self._registry.get(source.engine_id) is not None:
            return False  # this daemon under an address that it had before
        if not self.address:
            raise TransferFailed(
                f"engine {source.engine_id} is reached through the kvd at {there}; this one has no --peer-listen"
            )
        return True

    def accept(self, engine_id: str, message: Accept, source: Source, now: float) -> None:
        """A consumer of this node accepts from a producer of another.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
            StaleEpoch: the consumer has ended.
        """
        known = self._relay.known(engine_id, message)
        if known == "over":
            return
        if known == "live":
            end = self._relay.get(engine_id, message.handle)
            if end is not None and not end.cut and end.link.held:  # it, or its end, may have been lost
                self._send(end.link, Relayed(engine_id, message), now)
            return
        try:
            link = self.links.towards(source.kvd_address, now)
        except Overloaded as error:
            self._transfers.refuse(engine_id, message, error)
            return
        if self._relay.accept(engine_id, message, source, link, now):
            self._introduce(link, self._registry.live(engine_id), now)
            self._send(link, Relayed(engine_id, message), now)

    def retract(self, engine_id: str, message: Retract, now: float) -> bool:
        """A retraction; whether it was for one of these.

        Raises:
            InvalidRequest: not final: a consumer has nothing to preempt.
        """
        end = self._relay.get(engine_id, message.handle)
        if end is None:
            return False
        if not message.final:
            raise InvalidRequest(f"handle {message.handle} is a consumer's: nothing to preempt")
        if not end.cut:
            self._send(end.link, Relayed(engine_id, message), now)
        return True

    def cancel(self, message: Cancel, now: float) -> None:
        """Somebody gives a transfer up. What is not known here may be a peer's."""
        tid = message.transfer_id
        ends = self._relay.of_transfer(tid)
        links: Iterable[Link] = {end.link: None for end in ends if not end.cut}
        if not ends:
            known = tid in self._transfers.book.transfers or tid in self._transfers.book.tombs
            self._transfers.cancel(tid, message.reason, now)
            links = [] if known else self._open()
        for link in links:
            self._send(link, Relayed("", message), now)

    def renew(self, engine_id: str, message: Renew, now: float) -> None:
        """A service still has these requests; what is not known here may be a peer's, whose offer it will accept."""
        self._transfers.renew(engine_id, message.transfer_ids, now)
        open_, book = self._open(), self._transfers.book
        by_link: dict[Link, list[bytes]] = {}
        for tid in message.transfer_ids:
            ends = self._relay.of_transfer(tid)
            targets = {end.link for end in ends if not end.cut and end.link.state is LinkState.OPEN}
            if not ends and tid not in book.transfers and tid not in book.tombs:
                targets = set(open_)
            for link in targets:
                by_link.setdefault(link, []).append(tid)
        for link, tids in by_link.items():
            self._send(link, Relayed(engine_id, Renew(tuple(tids))), now)

    def _open(self) -> list[Link]:
        return [link for link in self.links if link.state is LinkState.OPEN]

    # -- what happens to engines of this node -----------------------------------------------

    def regions_changed(self, engine_id: str, now: float) -> None:
        """A rank's memory has come: peers that know its engine hear of it."""
        entry = self._registry.get(engine_id)
        for link in list(self.links):
            if entry is not None and engine_id in link.introduced:
                self._introduce(link, entry, now)
            if engine_id in self._readers.get(link, ()):
                self._want(link, engine_id)

    def engine_gone(self, engine_id: str, detail: str, now: float, *, over: bool) -> None:
        """An engine cannot be heard, or is over."""
        for link in list(self.links):
            if engine_id in link.introduced:
                self._send(link, PeerEngineGone(engine_id, detail, over), now)
                if over:
                    link.introduced.pop(engine_id, None)
                    self._readers.get(link, set()).discard(engine_id)

    def _introduce(self, link: Link, entry: EngineEntry, now: float) -> None:
        if link.introduced.get(entry.engine_id, -1) != len(entry.regions):
            link.introduced[entry.engine_id] = len(entry.regions)
            engine = PeerEngine(entry.engine_id, entry.ranks, entry.identity or {}, dict(entry.regions))
            self._send(link, engine, now)

    def _again(self, link: Link) -> None:
        """An operation came to nothing: a peer may have given up the cards that it had, and hears what they are now.
        Of all engines that it reads from, since what served one may have served all."""
        for engine_id in self._readers.get(link, ()):
            self._want(link, engine_id)

    def _want(self, link: Link, engine_id: str) -> None:
        if (link, engine_id) not in self._wanting:
            self._wanting.append((link, engine_id))

    def wanting(self) -> list[tuple[Link, str]]:
        """Whose cards are to be made and given to `carded`, and for which link; since the last call."""
        out, self._wanting = self._wanting, []
        return out

    def carded(self, link: Link, key: RegionKey, cards: Mapping[str, bytes], now: float) -> None:
        """The cards of one rank's memory are made."""
        if key.engine_id in self._readers.get(link, ()):
            self._send(link, RegionCards(key, cards), now)

    # -- what the core wants done -----------------------------------------------------------

    def carry_out(self, effect: Effect, now: float) -> Effect | None:
        """Takes what is another daemon's to do; what is left for this one."""
        match effect:
            case Tell(engine_id, End() as end) if (link := self.guests.link(engine_id)) is not None:
                self._send(link, Told(engine_id, end), now)
            case Post(op_id) if not self._relay.owns(op_id) and op_id not in self._transfers.book.ops:
                pass  # its guest was lost before this was read
            case Post() if (link := self.guests.link(effect.dst.engine_id)) is not None:
                self._post(effect, link, now)
            case CancelOp(op_id) if (link := self.guests.carrier(op_id)) is not None:
                self._send(link, effect, now)
            case TearDown(op_ids):
                return self._tear_down(op_ids, now)
            case Unmap(engine_id):
                self.guests.forgotten(engine_id)
                return effect  # sessions from it are closed
            case _:
                return effect
        return None

    def _post(self, post: Post, link: Link, now: float) -> None:
        source = self._registry.get(post.src.engine_id)
        if source is not None:
            self._introduce(link, source, now)
        if post.op_id not in self._transfers.book.ops:
            return  # that was too much for the link, and it is lost
        if post.src.engine_id not in self._readers.setdefault(link, set()):
            self._readers[link].add(post.src.engine_id)
            self._want(link, post.src.engine_id)
        self._send(link, self.guests.posted(post, link), now)

    def _tear_down(self, op_ids: tuple[int, ...], now: float) -> TearDown | None:
        theirs: dict[Link, list[int]] = {}
        ours = []
        for op_id in op_ids:
            if (link := self.guests.carrier(op_id)) is not None:
                theirs.setdefault(link, []).append(op_id)
            else:
                ours.append(op_id)
        for link, ids in theirs.items():
            self._send(link, TearDown(tuple(ids)), now)
        return TearDown(tuple(ours)) if ours else None

    def op_ended(self, op_id: int, now: float, *, moved: int, ns: int, transport: str, lanes: str, error: str) -> bool:
        """An operation of this node's copier is over; whether it was for a peer's book."""
        if not self._relay.owns(op_id):
            return False
        told = self._relay.op_ended(op_id, now, moved=moved, ns=ns, transport=transport, lanes=lanes, error=error)
        if told is not None:
            self._send(*told, now)
        return True

    # -- links ------------------------------------------------------------------------------

    def _send(self, link: Link, message: Message, now: float) -> None:
        self.links.send(link, message, now)

    def _lost(self, link: Link, error: PdserveError, now: float) -> None:
        self.lost += 1
        self._transfers.book.out.append(note(link, "peer_lost", error))
        self._readers.pop(link, None)
        reason = error if isinstance(error, PeerLost) or not link.held else PeerLost(error.message)
        self._relay.link_lost(link, reason, now)
        self.guests.lost(link, error, now)

    def expire(self, now: float) -> None:
        """Gives up the links that are due."""
        self.links.expire(now)

    def next_deadline(self) -> float | None:
        """When a link is to be given up or called."""
        return self.links.next_deadline()

    def put_off(self, seconds: float) -> None:
        """The daemon did not run for so long."""
        self.links.put_off(seconds)
