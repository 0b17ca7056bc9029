"""A consumer's end here whose transfer's book another node's daemon keeps: the record, and what operators are told of
it. Plain data; `relay` moves it."""

from dataclasses import dataclass, field

from pdserve.kvd.book import Handle
from pdserve.kvd.client.messages import End
from pdserve.kvd.effects import Stop
from pdserve.kvd.fences import Fence
from pdserve.kvd.leases import Lease
from pdserve.kvd.peers.link import Link
from pdserve.kvd.types import Mode


@dataclass(slots=True, eq=False)
class RelayedEnd:
    """One consumer's end here."""

    engine_id: str
    handle: str
    transfer_id: bytes
    consumer: int
    mode: Mode
    source: str
    """The engine that produces."""
    link: Link
    lease: Lease
    accepted_ns: int
    created_at: float
    ops: set[int] = field(default_factory=set)
    """In flight, by this daemon's names."""
    last: End | Stop | None = None
    """What is told once nothing is in flight: it is FENCING."""
    fence: Fence | None = None
    cut: bool = False
    """The link is lost: its peer is told nothing more of this."""
    bytes_fetched: int = 0
    transport: str = ""
    lanes: str = ""

    @property
    def key(self) -> Handle:
        """Its handle."""
        return self.engine_id, self.handle


def waits_for(end: RelayedEnd, now: float) -> str:
    """What an end waits for, in words; see `explain`."""
    copies = f"{len(end.ops)} operation{'' if len(end.ops) == 1 else 's'} in flight"
    if end.fence is not None:
        return f"fencing since {now - end.fence.since:.1f} s: {copies}"
    copying = f", {copies}" if end.ops else ""
    return f"kvd at {end.link.name} ({end.link.state.value}) keeps its book{copying}"
