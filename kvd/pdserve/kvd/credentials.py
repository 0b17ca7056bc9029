"""Checks the ticket or locator of an accept. Pure: the time is an argument."""

import msgspec

from pdserve.kvd.client.messages import Accept
from pdserve.kvd.consuming import Source
from pdserve.kvd.types import Locator, Mode, Ticket
from pdserve.rpc.errors import InvalidRequest, TicketRefused
from pdserve.runtime.signing import Kind, Signer

_ticket = msgspec.msgpack.Decoder(Ticket)
_locator = msgspec.msgpack.Decoder(Locator)


def source_of(signer: Signer, accept: Accept, unix_now: float) -> Source:
    """Who produces what an accept asks for.

    Raises:
        TicketForged, TicketExpired: the signature or its time does not hold.
        TicketRefused: signed, but not for this transfer, or not readable by this version.
        InvalidRequest: neither a ticket nor a locator.
    """
    if accept.ticket:
        payload = signer.verify(Kind.TICKET, accept.ticket, unix_now)
        try:
            ticket = _ticket.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TicketRefused(f"a ticket that this version does not read: {error}") from error
        if ticket.transfer_id != accept.transfer_id:
            raise TicketRefused("the ticket is another transfer's")
        locator = ticket.locator
        return Source(locator.engine_id, Mode.READ, locator.identity, locator.kvd_address)
    if accept.peer_locator:
        payload = signer.verify(Kind.LOCATOR, accept.peer_locator, unix_now)
        try:
            locator = _locator.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TicketRefused(f"a locator that this version does not read: {error}") from error
        return Source(locator.engine_id, Mode.WRITE, locator.identity, locator.kvd_address)
    raise InvalidRequest("an accept without ticket and locator")
