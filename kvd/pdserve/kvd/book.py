"""The shared state of the core: transfers by id, handles, what is over, deadlines, operations.

Only the parts of `transfers` touch it; everything they want done goes to `out`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pdserve.kvd.client.messages import End, Fenced
from pdserve.kvd.effects import Effect, Note, Tell
from pdserve.kvd.ends import ConsumerEnd, Op, ProducerEnd, Tomb, Transfer
from pdserve.kvd.fences import FenceCounts
from pdserve.kvd.leases import Leases
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk
from pdserve.kvd.progress import Progress
from pdserve.kvd.registry import Registry
from pdserve.kvd.states import ConsumerEvent, ProducerEvent, step_consumer, step_producer
from pdserve.kvd.timers import Timers
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import BY_REASON

Handle = tuple[str, str]
"""(engine_id, handle)."""


class Timer(NamedTuple):
    """Names a deadline; the fields that a kind does not use stay empty."""

    kind: Literal["lease", "accept", "transfer", "park", "pfence", "cfence", "tie", "orphan"]
    transfer_id: bytes = b""
    consumer: int = 0
    engine_id: str = ""
    handle: str = ""


def orphan_timer(handle: Handle) -> Timer:
    """When chunks of a handle that never begins are dropped."""
    return Timer("orphan", engine_id=handle[0], handle=handle[1])


@dataclass(slots=True)
class Step:
    """The chunks of the step that one rank is in."""

    number: int
    chunks: tuple[Chunk, ...]


@dataclass(slots=True, eq=False)
class Book:
    """See the module."""

    registry: Registry
    leases: Leases
    limits: Limits
    transfers: dict[bytes, Transfer] = field(default_factory=dict)
    by_engine: dict[str, dict[bytes, Transfer]] = field(default_factory=dict)
    handles: dict[Handle, tuple[Transfer, ProducerEnd | ConsumerEnd]] = field(default_factory=dict)
    ended_handles: "OrderedDict[Handle, End]" = field(default_factory=OrderedDict)
    tombs: "OrderedDict[bytes, Tomb]" = field(default_factory=OrderedDict)
    orphans: dict[Handle, Progress] = field(default_factory=dict)
    """Chunks that came before their handle's begin."""
    steps: dict[tuple[str, int], Step] = field(default_factory=dict)
    touched: dict[str, float] = field(default_factory=dict)
    """When something last moved for an engine as producer."""
    timers: Timers[Timer] = field(default_factory=Timers)
    ops: dict[int, Op] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    """How many handles ended, by outcome or reason; for operators."""
    expired: dict[str, int] = field(default_factory=dict)
    """How many deadlines of transfers ran out, by the timer's kind; for operators."""
    fences: FenceCounts = field(default_factory=FenceCounts)
    parked: int = 0
    """Transfers without a producer."""
    next_op: int = 1
    out: list[Effect] = field(default_factory=list)

    def add(self, transfer: Transfer) -> None:
        """Takes a new transfer in."""
        self.transfers[transfer.transfer_id] = transfer
        self.link(transfer.source_engine, transfer)
        self.parked += 1

    def link(self, engine_id: str, transfer: Transfer) -> None:
        """Lets an engine's end find the transfer."""
        self.by_engine.setdefault(engine_id, {})[transfer.transfer_id] = transfer

    def entomb(self, transfer: Transfer, tomb: Tomb) -> None:
        """The transfer is over: forgets it but for its tomb."""
        tid = transfer.transfer_id
        del self.transfers[tid]
        if transfer.producer is None:
            self.parked -= 1
        engines = {transfer.source_engine, *(c.engine_id for c in transfer.consumers.values())}
        for engine_id in engines:
            mine = self.by_engine.get(engine_id)
            if mine is not None:
                mine.pop(tid, None)
                if not mine:
                    del self.by_engine[engine_id]
        for timer in (Timer("lease", tid), Timer("accept", tid), Timer("park", tid), Timer("pfence", tid)):
            self.timers.clear(timer)
        self.remember(tid, tomb)

    def remember(self, transfer_id: bytes, tomb: Tomb) -> None:
        """Keeps a tomb, the oldest give way."""
        self.tombs[transfer_id] = tomb
        self.tombs.move_to_end(transfer_id)
        while len(self.tombs) > self.limits.max_remembered:
            self.tombs.popitem(last=False)

    def end_handle(self, engine_id: str, end: End, mode: Mode | None = None) -> None:
        """Sends a handle's one terminal event and remembers that it had it. `mode`: of a transfer that is not here."""
        key = (engine_id, end.handle)
        known = self.handles.pop(key, None)
        if self.orphans.pop(key, None) is not None:  # its begin was refused
            self.timers.clear(orphan_timer(key))
        self.ended_handles[key] = end
        while len(self.ended_handles) > self.limits.max_remembered:
            self.ended_handles.popitem(last=False)
        # A reason that a client made up must not grow the table.
        word = end.reason if end.reason in BY_REASON else end.outcome.value
        self.ended[word] = self.ended.get(word, 0) + 1
        self.out.append(Tell(engine_id, end, mode=known[0].mode if known else mode))

    def fenced(self, engine_id: str, handle: str, attempt: int) -> None:
        """Tells an engine that an attempt is fenced."""
        self.out.append(Tell(engine_id, Fenced(handle, attempt)))

    def move_producer(self, transfer: Transfer, end: ProducerEnd, event: ProducerEvent) -> None:
        """One step of the table, logged."""
        before, end.state = end.state, step_producer(end.state, event)
        self._note(transfer, "producer_moved", end.engine_id, end.handle, before.value, end.state.value)

    def move_consumer(self, transfer: Transfer, end: ConsumerEnd, event: ConsumerEvent) -> None:
        """One step of the table, logged."""
        before, end.state = end.state, step_consumer(end.state, event)
        self._note(transfer, "consumer_moved", end.engine_id, end.handle, before.value, end.state.value)

    def _note(self, transfer: Transfer, event: str, engine_id: str, handle: str, before: str, after: str) -> None:
        facts = (("engine_id", engine_id), ("handle", handle), ("before", before), ("after", after))
        self.out.append(Note(event, transfer.transfer_id, facts))
