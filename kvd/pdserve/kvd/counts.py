"""What the node counts as it happens, because no book keeps it: notices, copies, ends, ties. Pure."""

from dataclasses import dataclass

from pdserve.kvd.client.messages import End, Outcome
from pdserve.kvd.effects import Effect, Note, Tell
from pdserve.kvd.transport.port import Moved
from pdserve.kvd.types import Mode
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry.tally import Tally, known_reason


@dataclass(slots=True)
class Carried:
    """What one transport has carried over one set of lanes."""

    copies: int = 0
    nbytes: int = 0
    ns: int = 0
    """Spent copying, nanoseconds."""


class Counts:
    """Since the daemon's start."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.carried: dict[tuple[str, str], Carried] = {}
        """By transport and lanes."""
        for result in ("taken", "ignored"):
            self.tally.add(c.KVD_NOTICES, result, by=0)

    def notice(self, *, taken: bool) -> None:
        """A worker's notice has come; malformed ones are counted where they are read."""
        self.tally.add(c.KVD_NOTICES, "taken" if taken else "ignored")

    def copy(self, moved: Moved, mode: Mode, transport: str, error: str) -> None:
        """An operation is over. `transport`: empty where it never got one."""
        result = error if error == "cancelled" else "failed" if error else "done"
        labels = (mode.value, transport, moved.lanes)
        self.tally.add(c.KVD_COPIES, *labels, result)
        self.tally.add(c.KVD_COPIED_BYTES, *labels, by=moved.nbytes)
        self.tally.add(c.KVD_COPY_SECONDS, *labels, by=moved.ns / 1e9)
        if transport:
            carried = self.carried.setdefault((transport, moved.lanes), Carried())
            carried.copies += 1
            carried.nbytes += moved.nbytes
            carried.ns += moved.ns

    def effect(self, effect: Effect) -> None:
        """The core wants something done; ends and broken ties are told by that."""
        match effect:
            case Tell(message=End() as end) if not effect.again:
                self._end(end, effect.mode)
            case Note(event="tie_broken"):
                self.tally.add(c.KVD_TIES)

    def _end(self, end: End, mode: Mode | None) -> None:
        facts, which = end.facts, mode.value if mode else "none"
        side = "producer" if end.producer else "consumer"
        self.tally.add(c.KVD_ENDED, side, end.outcome.value, known_reason(end.reason), which, facts.transport)
        if end.outcome is Outcome.LANDED and facts.accepted_ns:  # absent where the engine did not stamp it
            seconds = (facts.landed_ns - facts.accepted_ns) / 1e9
            self.tally.observe(c.KVD_TRANSFER_SECONDS, seconds, which, facts.transport)
