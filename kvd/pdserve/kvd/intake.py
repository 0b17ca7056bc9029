"""The door of the core: which handles and transfers are taken in, and what the others are told. Pure."""

from typing import Final, Literal

from pdserve.kvd.book import Book
from pdserve.kvd.client.messages import End, Outcome
from pdserve.kvd.effects import Stop, Tell
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd
from pdserve.rpc.errors import InvalidRequest, KvdUnavailable, Overloaded, PdserveError

MAX_HANDLE: Final = 256
"""Longest handle, characters."""
MAX_CONSUMERS: Final = 1024
"""Of one transfer."""


def failed(kind: type[PdserveError], detail: str) -> Stop:
    """FAILED with a class's reason."""
    return Stop(Outcome.FAILED, kind.reason, detail)


class Intake:
    """See the module. `draining` refuses new transfers."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.draining = False

    def known(
        self, engine_id: str, handle: str, transfer_id: bytes, kind: type[ProducerEnd | ConsumerEnd]
    ) -> Literal["live", "over"] | None:
        """None for a new handle, "over" for an ended one, "live" for the same end said again. Who speaks
        of an ended one may not have heard of its end, which is told again.

        Raises:
            InvalidRequest: the handle is another end's, or none at all.
        """
        if not 0 < len(handle) <= MAX_HANDLE:
            raise InvalidRequest(f"a handle of {len(handle)} characters; 1 to {MAX_HANDLE}")
        key = (engine_id, handle)
        if self.tell_again(engine_id, handle):
            return "over"
        found = self._book.handles.get(key)
        if found is None:
            return None
        transfer, live = found
        if transfer.transfer_id != transfer_id or not isinstance(live, kind):
            raise InvalidRequest(f"handle {handle} is in use for another end")
        return "live"

    def tell_again(self, engine_id: str, handle: str) -> bool:
        """Tells the end of a handle again, where it has had one; whether it has."""
        end = self._book.ended_handles.get((engine_id, handle))
        if end is not None:
            self._book.out.append(Tell(engine_id, end, again=True))
        return end is not None

    def lives(self, engine_id: str) -> bool:
        """Whether an engine is here and has not ended."""
        entry = self._book.registry.get(engine_id)
        return entry is not None and not entry.ended

    def no_room(self, relayed: int = 0) -> Stop | None:
        """Why no new transfer is taken, beside those whose book another daemon keeps; None when one is."""
        limits = self._book.limits
        if self.draining:
            return failed(KvdUnavailable, "kvd drains and takes no new transfers")
        if len(self._book.transfers) + relayed >= limits.max_transfers or self._book.parked >= limits.max_parked:
            return failed(Overloaded, "too many open transfers")
        return None

    def end_at_once(
        self, engine_id: str, handle: str, transfer_id: bytes, stop: Stop, *, producer: bool, consumer: int = 0
    ) -> None:
        """The end of a handle that never became part of a transfer."""
        end = End(handle, transfer_id, stop.outcome, stop.reason, stop.detail, producer=producer, consumer=consumer)
        self._book.end_handle(engine_id, end)
