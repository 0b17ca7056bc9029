"""Which handles a participant has open at kvd, so that each gets exactly one end. Pure.

    send(begin | offer | accept) -> OPEN -> end -> ENDED (delivered, not yet drained) -> forgotten

A handle that ended is not opened again by an offer that was under way: the end is its answer.

Blocks of a preempted attempt are kvd's until it has fenced them; an engine that schedules ahead
may meanwhile give them to a consumer. Its accept is held back here until the fences have come.
"""

from collections.abc import Iterable

from pdserve.kvd.client.messages import Accept, Begin, End, Fenced, Offer, Outcome, Request, Retract
from pdserve.rpc.errors import PdserveError


class Ledger:
    """`strict` for the participant that opens handles (the scheduler): an end of a handle that is
    not open is a duplicate and is dropped. Others only listen and hear every end."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._open: dict[str, list[Begin | Offer | Accept | Retract]] = {}
        self._ended: set[str] = set()
        self._fencing: set[tuple[str, int]] = set()
        self._held: list[Accept] = []
        self._long_open: set[str] = set()
        self.duplicates = 0
        """Ends dropped because their handle was not open."""

    @property
    def open(self) -> int:
        """Handles that wait for their end."""
        return len(self._open)

    def sending(self, message: Request) -> bool:
        """Notes a message; whether it is to be sent now. One whose handle has ended never is."""
        if isinstance(message, Retract):
            if not message.final:
                self._fencing.add((message.handle, message.attempt))
            if message.handle in self._open:
                self._open[message.handle].append(message)
            return True
        if not isinstance(message, Begin | Offer | Accept):
            return True
        if message.handle in self._ended:
            return False
        self._open.setdefault(message.handle, []).append(message)
        if self._fencing and isinstance(message, Accept):
            self._held.append(message)
            return False
        return True

    def fenced(self, fenced: Fenced) -> list[Request]:
        """Notes a fence; what may be sent now."""
        self._fencing.discard((fenced.handle, fenced.attempt))
        if self._fencing:
            return []
        held, self._held = self._held, []
        return [message for message in held if message.handle in self._open]

    def ended(self, end: End) -> bool:
        """Notes an end; whether it is to be delivered."""
        if not self._strict:
            return True
        if self._open.pop(end.handle, None) is None:
            self.duplicates += 1
            return False
        self._ended.add(end.handle)
        return True

    def drained(self, handles: Iterable[str]) -> None:
        """Their ends have reached the user, who sends nothing for them any more."""
        self._ended.difference_update(handles)

    def again(self) -> list[Request]:
        """What to say to the same kvd over a new stream: all that is open, oldest first."""
        return [m for messages in self._open.values() for m in messages if m not in self._held]

    def overdue(self) -> list[Request]:
        """What to say again over a stream that stands: all that is open now and was at the last call.
        It, or its end, may have been lost."""
        before, self._long_open = self._long_open, set(self._open)
        found = [m for handle in self._open if handle in before for m in self._open[handle]]
        return [message for message in found if message not in self._held]

    def refuse(self, handle: str, error: PdserveError) -> list[End]:
        """Ends one handle, if it is open: what was said of it cannot be sent."""
        messages = self._open.pop(handle, None)
        if messages is None:
            return []
        self._ended.add(handle)
        return [_local_end(messages[0], error)]

    def abandon(self, error: PdserveError) -> list[End]:
        """Ends everything that is open: kvd is gone."""
        ends = [_local_end(messages[0], error) for messages in self._open.values()]
        self._ended.update(self._open)
        self._open.clear()
        self._held.clear()
        self._fencing.clear()
        return ends


def _local_end(message: Begin | Offer | Accept | Retract, error: PdserveError) -> End:
    assert not isinstance(message, Retract), "a retraction opens nothing"
    consumer = message.consumer if isinstance(message, Accept) else 0
    return End(
        handle=message.handle,
        transfer_id=message.transfer_id,
        outcome=Outcome.FAILED,
        reason=error.reason,
        detail=error.message,
        producer=not isinstance(message, Accept),
        consumer=consumer,
    )
