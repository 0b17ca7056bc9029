"""What two daemons say to each other, as values; `codec` has the wire. peer.proto has units and lifetimes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdserve.kvd.client.messages import Accept, Cancel, End, Facts, Renew, Retract
from pdserve.kvd.effects import CancelOp, TearDown
from pdserve.kvd.registry import Region
from pdserve.kvd.types import RegionKey


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the peer's clocks are ahead of ours, nanoseconds."""

    monotonic_ns: int = 0
    unix_ns: int = 0
    uncertainty_ns: int = 0

    @property
    def seen_from_there(self) -> "ClockOffset":
        """The same, as the peer sees it."""
        return ClockOffset(-self.monotonic_ns, -self.unix_ns, self.uncertainty_ns)

    def ours(self, theirs_ns: int) -> int:
        """A peer's monotonic stamp on our clock; 0 (no stamp) stays 0."""
        return theirs_ns - self.monotonic_ns if theirs_ns else 0

    def facts(self, facts: Facts) -> Facts:
        """A peer's facts with their stamps on our clock."""
        return replace(
            facts,
            first_post_ns=self.ours(facts.first_post_ns),
            landed_ns=self.ours(facts.landed_ns),
            offered_ns=self.ours(facts.offered_ns),
            accepted_ns=self.ours(facts.accepted_ns),
            last_byte_ns=self.ours(facts.last_byte_ns),
        )


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who speaks, and where the link stands on its side."""

    epoch: str
    version: str
    protocol: int
    node: str
    address: str
    boot_id: str
    monotonic_ns: int
    unix_ns: int
    link: int = 0
    held: bool = False
    received: int = 0
    beat_ms: int = 0
    """How long it is silent on an open link at most, milliseconds."""


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine of the sender's node; `regions` by rank."""

    engine_id: str
    ranks: int
    identity: Mapping[str, str]
    regions: Mapping[int, Region]


@dataclass(frozen=True, slots=True)
class RegionCards:
    """How to read one rank's memory, by transport."""

    key: RegionKey
    cards: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class PeerEngineGone:
    """An engine of the sender's node cannot be heard, or is over."""

    engine_id: str
    detail: str
    over: bool


@dataclass(frozen=True, slots=True)
class Relayed:
    """What an engine of the sender's node said of a transfer whose book the receiver keeps."""

    engine_id: str
    request: Accept | Retract | Cancel | Renew


@dataclass(frozen=True, slots=True)
class Told:
    """What the receiver's engine is to hear."""

    engine_id: str
    end: End


@dataclass(frozen=True, slots=True)
class PostOp:
    """Fetch blocks of the sender's engine into those of a handle of the receiver's."""

    op_id: int
    transfer_id: bytes
    source: str
    engine_id: str
    handle: str
    rank: int
    """Of the receiver's engine."""
    layers: tuple[int, ...]
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    source_rank: int = 0
    first: int = 0
    """See `effects.Post`."""


@dataclass(frozen=True, slots=True)
class OpEnded:
    """Nothing of an operation is in flight any more; `error` empty: every byte is in place."""

    op_id: int
    moved: int = 0
    ns: int = 0
    transport: str = ""
    error: str = ""
    lanes: str = ""
    """What carried it, where the transport tells."""


Message = (
    ClockOffset | PeerEngine | RegionCards | PeerEngineGone | Relayed | Told | PostOp | CancelOp | TearDown | OpEnded
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a link; number 0 is outside the row. Without a message it only acknowledges."""

    number: int
    received: int
    message: Message | None = None
