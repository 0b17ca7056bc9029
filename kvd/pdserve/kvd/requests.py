"""What engines of this node say, and whose it is to hear it: this node's core, or through `Desk` another node's."""

from pdserve.kvd.client.messages import Accept, Begin, Cancel, Offer, Renew, Request, Retract
from pdserve.kvd.consuming import Source
from pdserve.kvd.credentials import source_of
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.peers.hearing import Check
from pdserve.kvd.transfers import Transfers
from pdserve.rpc.errors import PdserveError
from pdserve.runtime.clock import Clock
from pdserve.runtime.signing import Signer


def source(signer: Signer, clock: Clock, accept: Accept) -> Source:
    """Who produces what an accept asks for, as of now; see `source_of`."""
    return source_of(signer, accept, clock.unix())


class Requests:
    """See the module."""

    def __init__(self, transfers: Transfers, desk: Desk, check: Check) -> None:
        self._transfers = transfers
        self._desk = desk
        self._check = check

    def take(self, engine_id: str, message: Request, now: float) -> None:
        """One message of an engine.

        Raises:
            StaleEpoch: its engine has ended.
            InvalidRequest: it cannot be carried out and belongs to no handle that could be told.
        """
        if isinstance(message, Begin | Offer | Accept):
            self._transfers.book.registry.live(engine_id)
        match message:
            case Begin():
                self._transfers.begin(engine_id, message, now)
            case Offer():
                self._transfers.offer(engine_id, message, now)
            case Accept():
                self._accept(engine_id, message, now)
            case Retract():
                if not self._desk.retract(engine_id, message, now):
                    self._transfers.retract(engine_id, message, now)
            case Cancel():
                self._desk.cancel(message, now)
            case Renew():
                self._desk.renew(engine_id, message, now)

    def _accept(self, engine_id: str, message: Accept, now: float) -> None:
        try:
            producer = self._check(message)
            elsewhere = self._desk.elsewhere(producer)
        except PdserveError as error:
            self._transfers.refuse(engine_id, message, error)
        else:
            (self._desk.accept if elsewhere else self._transfers.accept)(engine_id, message, producer, now)
