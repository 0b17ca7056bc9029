"""What an engine and its kvd say to each other, as values: users of the client never see protobuf.

A *handle* is the engine's own id of one request; unique within the engine's life.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.kvd.types import PROTOCOL, Mode


class Participant(enum.Enum):
    """Which process of an engine speaks."""

    HOST = "host"
    SCHEDULER = "scheduler"
    WORKER = "worker"


class Outcome(enum.Enum):
    """How a transfer ended at one end."""

    RELEASED = "released"
    """Producer: every consumer has landed, blocks may be freed."""
    LANDED = "landed"
    """Consumer: every byte on every rank is in place."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def good(self) -> bool:
        """Whether the hand-over did what it should."""
        return self in (Outcome.RELEASED, Outcome.LANDED)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who attaches. The same hello again is the same participant coming back."""

    engine_id: str
    participant: Participant
    identity: Mapping[str, str]
    ranks: int = 1
    rank: int = 0
    """Of a worker: tensor-parallel rank."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Begin:
    """A producer starts to compute a prompt for a transfer."""

    handle: str
    transfer_id: bytes
    mode: Mode
    consumers: int = 1


@dataclass(frozen=True, slots=True)
class Offer:
    """A producer has computed a prompt and holds its blocks."""

    handle: str
    transfer_id: bytes
    attempt: int
    block_ids: tuple[int, ...]
    tokens: int
    mode: Mode
    consumers: int = 1
    stamped_ns: int = 0
    """Monotonic nanoseconds at which the last chunk's forward pass ended."""


@dataclass(frozen=True, slots=True)
class Accept:
    """A consumer has reserved blocks and waits for them to be filled.

    Without blocks (the consumer has them all) it ends at once as LANDED.
    """

    handle: str
    transfer_id: bytes
    consumer: int
    block_ids: tuple[int, ...]
    first_block: int
    """The prompt's block that `block_ids[0]` is."""
    ticket: bytes = b""
    """READ: signed. Exactly one of ticket and peer_locator is set."""
    peer_locator: bytes = b""
    """WRITE: signed."""
    stamped_ns: int = 0
    """Monotonic nanoseconds at which the blocks were reserved."""


@dataclass(frozen=True, slots=True)
class Retract:
    """A producer takes its blocks back: preempted, or aborted for good (`final`)."""

    handle: str
    attempt: int
    final: bool
    reason: str
    """A reason of pdserve.rpc.errors."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Gives a transfer up, from either end."""

    transfer_id: bytes
    reason: str
    """A reason of pdserve.rpc.errors."""


@dataclass(frozen=True, slots=True)
class Renew:
    """The service beside an engine still has these requests: what waits for its half goes on waiting."""

    transfer_ids: tuple[bytes, ...]


Request = Begin | Offer | Accept | Retract | Cancel | Renew


@dataclass(frozen=True, slots=True)
class Welcome:
    """kvd's answer to a hello, and again what has changed of it."""

    kvd_epoch: str
    """Fresh at every start of kvd."""
    notice_endpoint: str
    """ZMQ endpoint for notices."""
    memory_socket: str
    """Unix socket that takes a rank's memory."""
    lease_s: float
    """Lease of a producer, seconds."""
    renew_s: float
    """How often a service renews the transfers that it still has, seconds."""
    fence_s: float
    """Longest wait for a fence, seconds."""
    peer_address: str = ""
    """HOST:PORT at which other nodes reach kvd; empty where it has no peers."""
    draining: bool = False
    """It takes no new transfers."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a hand-over really did; see TransferFacts in common.proto for units. Of a bad end: what it had done until
    then, without blocks, layers and ranks, and with the last byte's time only where that was in place."""

    kv_bytes: int = 0
    blocks: int = 0
    layers: int = 0
    ranks: int = 0
    copy_ns: int = 0
    transport: str = ""
    first_post_ns: int = 0
    landed_ns: int = 0
    overlapped_bytes: int = 0
    offered_ns: int = 0
    accepted_ns: int = 0
    last_byte_ns: int = 0
    lanes: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal event of one handle."""

    handle: str
    transfer_id: bytes
    outcome: Outcome
    reason: str = ""
    """A reason of pdserve.rpc.errors; empty where the outcome is good."""
    detail: str = ""
    """For people."""
    facts: Facts = field(default_factory=Facts)
    producer: bool = False
    consumer: int = 0
    """Which consumer's, where it is not the producer's."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Nothing of this attempt is in flight and nothing more will be posted."""

    handle: str
    attempt: int


Response = Welcome | End | Fenced
