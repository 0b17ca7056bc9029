"""What a measurement finds, as values; kvd.proto has units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.kvd.types import MemoryKind


@dataclass(frozen=True, slots=True)
class Device:
    """A network device, or one port of an RDMA device."""

    name: str
    kind: Literal["net", "rdma"]
    bits_per_second: int = 0
    """Nominal; 0: not known."""
    up: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """Scratch memory that another daemon may read."""

    nbytes: int
    seed: int
    """Of what it holds; see peer.proto."""
    cards: Mapping[str, bytes]
    """By transport."""
    refused: Mapping[str, str]
    """Transports of the lender's without a card, and why."""
    devices: Sequence[Device]
    """Of the lender's node."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Copies in blocks of one size."""

    block_bytes: int
    nbytes: int
    """Of one copy."""
    seconds: float
    """Of that copy; the median one's."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """One transport, as far as it was measured."""

    lanes: str = ""
    latency: float = 0.0
    """Of one small block, seconds; 0: not measured."""
    speeds: tuple[Speed, ...] = ()
    error: str = ""
    """Why it was not measured, or not to the end."""

    @property
    def best(self) -> float:
        """Bytes a second, of the block size that was fastest; 0: not measured."""
        return max((speed.rate for speed in self.speeds), default=0.0)


NOT_MEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One transport between two memories."""

    transport: str
    used: bool
    why_not: str = ""
    measured: Measured = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Way:
    """From memory of one kind, here or at a peer, to memory of that kind here."""

    peer: str
    """HOST:PORT; empty: within this node."""
    kind: MemoryKind
    node: str = ""
    epoch: str = ""
    candidates: tuple[Candidate, ...] = ()
    error: str = ""
    """Why there is no way."""
    reason: str = ""
    """Of `pdserve.rpc.errors`, with `error`."""
    devices_there: tuple[Device, ...] = ()

    @property
    def used(self) -> Candidate | None:
        """What hand-overs take."""
        return next((one for one in self.candidates if one.used), None)


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement."""

    ways: tuple[Way, ...]
    devices: tuple[Device, ...]
    """Of this node."""
    scratch_bytes: int
    seconds: float
