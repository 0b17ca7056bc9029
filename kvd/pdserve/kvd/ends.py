"""The records of a transfer and its two kinds of ends. Plain data; `transfers` moves it. `reshard` says what a unit is:
between engines whose blocks have one size it is a block."""

from dataclasses import dataclass, field

from pdserve.kvd.effects import Stop
from pdserve.kvd.fences import Fence
from pdserve.kvd.leases import Lease
from pdserve.kvd.progress import Progress
from pdserve.kvd.reshard import Match
from pdserve.kvd.states import Consumer, Producer
from pdserve.kvd.types import Mode


@dataclass(slots=True, eq=False)
class ProducerEnd:
    """The end whose blocks are read."""

    engine_id: str
    handle: str
    progress: Progress
    lease: Lease
    state: Producer = Producer.NONE
    offered_ns: int = 0
    fencing_attempt: int | None = None
    """A retraction that waits for its `fenced`."""
    fence: Fence | None = None
    """While in FENCING."""
    stop: Stop | None = None


@dataclass(slots=True, eq=False)
class ConsumerEnd:
    """One end whose blocks are filled.

    prompt blocks   | 0 .. first_block-1 | first_block .. end-1 |
                      consumer has them    block_ids
    """

    index: int
    engine_id: str
    handle: str
    first_block: int
    block_ids: tuple[int, ...]
    lease: Lease
    accepted_ns: int = 0
    state: Consumer = Consumer.NONE
    paired: bool = False
    """Layouts, ranks and counts of the two ends were compared and fit."""
    match: Match | None = None
    """How blocks go from the producer's ranks to this one's; None until paired."""
    wanted: int = 0
    """One past the last unit of the prompt that is to be filled; counts from `paired` on."""
    posted: dict[tuple[int, int], int] = field(default_factory=dict)
    """(source rank, layer) -> units posted of the producer's present attempt, from the prompt's first."""
    missing: int = -1
    """Units times layers times pairs of ranks that have not landed; -1 until paired."""
    ops: set[int] = field(default_factory=set)
    fence: Fence | None = None
    """While in FENCING."""
    stop: Stop | None = None
    peer_stop: Stop | None = None
    """What the producer hears, should this be why it ends."""
    bytes_landed: int = 0
    bytes_overlapped: int = 0
    copy_ns: int = 0
    first_post_ns: int = 0
    last_byte_ns: int = 0
    transport: str = ""
    lanes: str = ""
    """What the transport moved its bytes over, of the last copy that told."""

    @property
    def end(self) -> int:
        """One past the prompt's last block that it wants."""
        return self.first_block + len(self.block_ids)

    @property
    def terminal(self) -> bool:
        """Whether its handle has had its end."""
        return self.state in (Consumer.LANDED, Consumer.FAILED)


@dataclass(slots=True, eq=False)
class Transfer:
    """One request's hand-over: at most one producer, and its consumers by index."""

    transfer_id: bytes
    mode: Mode
    source_engine: str
    """The engine that produces: as the producer's own message or a consumer's locator says."""
    created_at: float
    stop: Stop | None = None
    """Set once the transfer as a whole is given up: what ends that come later hear."""
    wanted: int | None = None
    """Consumers that will accept; None until the producer has said."""
    producer: ProducerEnd | None = None
    consumers: dict[int, ConsumerEnd] = field(default_factory=dict)

    @property
    def all_came(self) -> bool:
        """Whether every consumer has accepted."""
        if self.wanted is None or len(self.consumers) < self.wanted:
            return False
        return sum(index < self.wanted for index in self.consumers) == self.wanted

    @property
    def over(self) -> bool:
        """Whether every end that is here has had its terminal event."""
        producer_over = self.producer is None or self.producer.state is Producer.FREED
        return producer_over and all(c.terminal for c in self.consumers.values())


@dataclass(slots=True, eq=False)
class Op:
    """One posted copy."""

    op_id: int
    transfer: Transfer
    consumer: ConsumerEnd
    attempt: int
    source: Lease
    layers: int
    units: int


@dataclass(slots=True)
class Tomb:
    """What is remembered of a transfer that is over."""

    stop: Stop | None
    produced: bool
    consumed: set[int]
