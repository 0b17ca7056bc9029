"""What a measurement finds, as values; kvd.proto has units."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdserve.kvd.types import MemoryKind


@dataclass(frozen=True, slots=True)
class Device:
    """A network device, one port of an RDMA device, or a GPU; "xgmi": one that XGMI links join to others."""

    name: str
    """Of a GPU: its PCI bus id."""
    kind: Literal["net", "rdma", "gpu", "xgmi"]
    bits_per_second: int = 0
    """Nominal, of "xgmi" that of its slowest link; 0: not known."""
    up: bool = False


@dataclass(frozen=True, slots=True)
class Gpus:
    """The accelerators of a node, as its kernel shows them."""

    devices: tuple[Device, ...] = ()
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """XGMI's: bytes a second, nominal, from one bus id to another."""


class Exposure(enum.Enum):
    """Who may reach a socket that listens, by the address that it is bound to."""

    LOOPBACK = "loopback"
    PRIVATE = "private"
    WILDCARD = "wildcard"
    """Every address of the host."""
    PUBLIC = "public"
    NONE = "none"
    """Nothing listens."""
    UNKNOWN = "unknown"
    """It could not be looked at."""


@dataclass(frozen=True, slots=True)
class Listener:
    """What a process listens at."""

    transport: str
    pid: int
    address: str = ""
    """Empty: it does not listen, or was not looked at."""
    port: int = 0
    exposure: Exposure = Exposure.NONE
    why: str = ""
    """Why it could not be looked at."""


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
    link: str = ""
    """What it goes over where it does not say itself: "RDMA", "XGMI"."""


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
    devices: tuple[str, str] | None = None
    """Of device memory: bus ids of the GPU that is read, and of the one that reads."""
    not_measured: str = ""
    """Why nothing of it was, where no transport is to blame."""

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
    listeners: tuple[Listener, ...] = ()
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """See Gpus."""
