"""Signed words of other engines: made for ours, checked before ours is touched.

kvd checks again, and knows what a service cannot: whether the epoch still lives.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdserve.engine.port import EngineInfo
from pdserve.kvd.types import Locator, Ticket, identity_difference
from pdserve.rpc.errors import IncompatibleEngines, TicketRefused
from pdserve.runtime.signing import Kind, Signer

T = TypeVar("T")

_tickets = msgspec.msgpack.Decoder(Ticket)
_locators = msgspec.msgpack.Decoder(Locator)


class Peers:
    """Signs for one engine, and reads what others signed."""

    def __init__(self, info: EngineInfo, kvd_address: str | Callable[[], str], signer: Signer) -> None:
        """`kvd_address`: where other nodes reach the engine's kvd, or its socket; asked each time if it may change."""
        self._info = info
        self._address = kvd_address
        self._signer = signer

    @property
    def _ours(self) -> Locator:
        return self._info.locator(self._address if isinstance(self._address, str) else self._address())

    def our_locator(self, expires_at: float) -> bytes:
        """This engine's locator, signed until `expires_at` (unix seconds)."""
        return self._signer.sign(Kind.LOCATOR, msgspec.msgpack.encode(self._ours), expires_at)

    def our_ticket(self, transfer_id: bytes, tokens: int, blocks: int, expires_at: float) -> bytes:
        """A ticket for what this engine has on offer, signed until `expires_at` (unix seconds)."""
        ticket = Ticket(self._ours, transfer_id, tokens, blocks)
        return self._signer.sign(Kind.TICKET, msgspec.msgpack.encode(ticket), expires_at)

    def check_ticket(self, signed: bytes, transfer_id: bytes, tokens: int, now: float) -> Ticket:
        """Reads the ticket of a producer for a prompt of `tokens`.

        Raises:
            TicketForged, TicketExpired: see Signer.verify.
            TicketRefused: it is for another transfer or another prompt.
            IncompatibleEngines: the producer may not hand over to this engine.
        """
        ticket = _read(_tickets, self._signer.verify(Kind.TICKET, signed, now))
        if ticket.transfer_id != transfer_id:
            raise TicketRefused(f"the ticket is for transfer {ticket.transfer_id.hex()}, not {transfer_id.hex()}")
        if ticket.tokens != tokens:
            raise TicketRefused(f"the ticket is for a prompt of {ticket.tokens} tokens, this one has {tokens}")
        self._check_identity(ticket.locator)
        return ticket

    def check_locator(self, signed: bytes, now: float) -> Locator:
        """Reads the locator of the other leg.

        Raises:
            TicketForged, TicketExpired: see Signer.verify.
            IncompatibleEngines: the two engines may not exchange KV.
        """
        locator = _read(_locators, self._signer.verify(Kind.LOCATOR, signed, now))
        self._check_identity(locator)
        return locator

    def _check_identity(self, theirs: Locator) -> None:
        difference = identity_difference(self._ours.identity, theirs.identity)
        if difference:
            named = ", ".join(f"{name}: {values}" for name, values in difference.items())
            raise IncompatibleEngines(
                f"engines {self._info.engine_id} and {theirs.engine_id} may not exchange KV: {named}; "
                f"ours: {self._info.layout or 'a layout not told'}; theirs: {theirs.layout or 'a layout not told'}",
                **difference,
            )


def _read(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TicketRefused(f"signed by a member of the cluster, of another version: {error}") from error
