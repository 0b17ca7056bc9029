"""What peers say: each message of a link, and what it does here. Pure."""

from collections.abc import Callable
from dataclasses import replace

from pdserve.kvd.client.messages import Accept, Cancel, End, Outcome, Renew, Retract
from pdserve.kvd.consuming import Source
from pdserve.kvd.effects import CancelOp, Note, TearDown
from pdserve.kvd.peers.guests import Guests
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.links import Links
from pdserve.kvd.peers.messages import (
    ClockOffset,
    Frame,
    Message,
    OpEnded,
    PeerEngine,
    PeerEngineGone,
    PostOp,
    RegionCards,
    Relayed,
    Told,
)
from pdserve.kvd.transfers import Transfers
from pdserve.rpc.errors import PdserveError, StaleEpoch, TicketRefused

Check = Callable[[Accept], Source]
"""Who produces what an accept asks for; raises PdserveError where its ticket or locator does not hold."""


def note(link: Link, event: str, error: PdserveError) -> Note:
    """For the log: what happened to a link."""
    facts = (("peer", link.name), ("epoch", link.epoch), ("reason", error.reason), ("detail", error.message))
    return Note(event, b"", facts)


class Hearing:
    """See the module."""

    def __init__(
        self,
        links: Links,
        guests: Guests,
        transfers: Transfers,
        check: Check,
        unread: Callable[[Link], None],
    ) -> None:
        """`unread` hears of a peer that could not read what it was to."""
        self._links = links
        self._guests = guests
        self._transfers = transfers
        self._relay = transfers.relay
        self._check = check
        self._unread = unread

    def heard(self, link: Link, stream: int, frame: Frame, now: float) -> None:
        """One frame of a stream. What makes no sense breaks the link; what cannot be done is noted, or told."""
        if stream != link.stream:
            return
        self._links.heard(link, now)
        try:
            message = link.take(frame)
            if message is not None:
                self._take(link, message, now)
        except PdserveError as error:
            self._transfers.book.out.append(note(link, "peer_broken", error))
            self._links.broken(link, stream, error, now)

    def _take(self, link: Link, message: Message, now: float) -> None:
        match message:
            case ClockOffset():
                link.clock = message.seen_from_there
            case PeerEngine():
                try:
                    self._guests.introduced(link, message, now)
                except StaleEpoch as error:  # whoever speaks for it hears why
                    self._transfers.book.out.append(note(link, "guest_refused", error))
            case RegionCards():
                self._guests.carded(link, message)
            case PeerEngineGone():
                self._guests.gone(link, message, now)
            case Relayed(engine_id, request):
                self._relayed(link, engine_id, request, now)
            case Told(engine_id, end):
                self._relay.ended(link, engine_id, replace(end, facts=link.clock.facts(end.facts)), now)
            case PostOp():
                self._answer(link, self._relay.post(link, message), now)
            case CancelOp(op_id):
                self._answer(link, self._relay.cancel_op(link, op_id), now)
            case TearDown(op_ids):
                for over in self._relay.tear_down(link, op_ids):
                    self._answer(link, over, now)
            case OpEnded():
                self._guests.op_ended(link, message, now)
                if message.error:
                    self._unread(link)

    def _answer(self, link: Link, ended: OpEnded | None, now: float) -> None:
        if ended is not None:
            self._links.send(link, ended, now)

    def _relayed(self, link: Link, engine_id: str, request: Accept | Retract | Cancel | Renew, now: float) -> None:
        guest = self._guests.link(engine_id) is link
        try:
            match request:
                case Accept():
                    self._accept_of(link, engine_id, request, guest, now)
                case Retract() if guest:
                    self._transfers.retract(engine_id, request, now)
                case Cancel():
                    self._transfers.cancel(request.transfer_id, request.reason, now)
                case Renew() if guest or self._transfers.book.registry.get(engine_id) is None:
                    self._transfers.renew(engine_id, request.transfer_ids, now)
        except PdserveError as error:
            self._transfers.book.out.append(note(link, "relayed_refused", error))

    def _accept_of(self, link: Link, engine_id: str, accept: Accept, guest: bool, now: float) -> None:
        accept = replace(accept, stamped_ns=link.clock.ours(accept.stamped_ns))
        try:
            if not guest:
                raise StaleEpoch(f"engine {engine_id} has ended")
            source = self._check(accept)
            if self._guests.link(source.engine_id) is not None:
                raise TicketRefused(f"engine {source.engine_id} does not live here")
            self._transfers.accept(engine_id, accept, source, now)
        except PdserveError as error:
            end = End(
                accept.handle,
                accept.transfer_id,
                Outcome.FAILED,
                error.reason,
                error.message,
                consumer=accept.consumer,
            )
            self._links.send(link, Told(engine_id, end), now)
