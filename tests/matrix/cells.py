"""Which cells there are, which cannot happen and why, and what each of the others must end in."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final

from pdserve.client import Mode
from tests.matrix import settings
from tests.matrix.faults import Fault
from tests.matrix.phases import Phase

MODES: Final[tuple[Mode, ...]] = ("read", "write")
_ORDER: Final = list(Phase)


@dataclass(frozen=True, slots=True)
class Cell:
    """One phase, one fault, one mode."""

    phase: Phase
    fault: Fault
    mode: Mode

    def __str__(self) -> str:
        return dashed(f"{self.fault.value}:{self.phase.value}:{self.mode}")

    @property
    def read(self) -> bool:
        """Decode pulls."""
        return self.mode == "read"

    def from_(self, phase: Phase) -> bool:
        """Whether the request has come as far as that."""
        return _ORDER.index(self.phase) >= _ORDER.index(phase)


def dashed(name: str) -> str:
    """A name as `pytest -k` takes it."""
    return name.replace(" ", "-")


def every() -> Iterator[Cell]:
    """The whole matrix."""
    for phase in Phase:
        for fault in Fault:
            for mode in MODES:
                yield Cell(phase, fault, mode)


# -- what cannot happen ---------------------------------------------------------------------

_ENDS: Final = {Fault.END_DROPPED, Fault.P_END_DROPPED, Fault.END_TWICE, Fault.END_LATE}
_LAYERS: Final = {Fault.LAYER_DROPPED, Fault.LAYER_TWICE, Fault.LAYER_LATE}
_LINK: Final = {Fault.LINK_FAILS, Fault.LINK_HANGS}


@dataclass(frozen=True, slots=True)
class Cannot:
    """Cells that cannot happen, for one reason."""

    faults: Set[Fault]
    phases: Set[Phase]
    modes: Set[Mode]
    because: str

    def holds(self, cell: Cell) -> bool:
        """Whether a cell is one of them."""
        return cell.fault in self.faults and cell.phase in self.phases and cell.mode in self.modes


def _since(phase: Phase) -> frozenset[Phase]:
    return frozenset(_ORDER[_ORDER.index(phase) :])


_ALL_FAULTS: Final = frozenset(Fault)
_ALL: Final = frozenset(Phase)
_BOTH: Final = frozenset(MODES)
_READ: Final[frozenset[Mode]] = frozenset({"read"})
_WRITE: Final[frozenset[Mode]] = frozenset({"write"})

_ACCEPTED: Final = "kvd reads its wall clock at an accept, which has come"
_LANDED: Final = "every byte has landed"

CANNOT: Final = (
    Cannot(_ALL_FAULTS, {Phase.LAYER}, _READ, "READ moves nothing before the offer: no layer is told"),
    Cannot(_ALL_FAULTS, {Phase.DONE, Phase.BETWEEN}, _WRITE, "WRITE asks both engines at once"),
    Cannot({Fault.CANCEL}, {Phase.REGISTERED}, _BOTH, "there is no request yet that could be cancelled"),
    Cannot(_LAYERS, _ALL, _READ, "READ has no notices of layers"),
    Cannot(_LAYERS, _since(Phase.DONE), _WRITE, "prefill has computed its last layer"),
    Cannot(_LINK, _since(Phase.NOTICE), _BOTH, _LANDED),
    Cannot(_LINK, {Phase.OFFER}, _WRITE, _LANDED),
    Cannot(_ENDS, _since(Phase.NOTICE), _BOTH, "the ends are on their way already, or have arrived"),
    Cannot({Fault.CLOCK_KVD}, {Phase.OFFER, *_since(Phase.POSTED)}, _BOTH, _ACCEPTED),
    Cannot(
        {Fault.CLOCK_KVD},
        {Phase.QUEUED, Phase.COMPUTING, Phase.LAYER},
        _WRITE,
        _ACCEPTED,
    ),
)
"""The first that holds counts."""


def cannot(cell: Cell) -> str:
    """Why a cell cannot happen; empty where it can."""
    return next((entry.because for entry in CANNOT if entry.holds(cell)), "")


# -- what must come of the others -----------------------------------------------------------

_GONE: Final = frozenset({"ENGINE_DIED", "PEER_LOST", "STALE_EPOCH"})
"""An engine is not there any more: seen by the proxy, by its peer, or by kvd when it is named too late."""
_NO_KVD: Final = frozenset({"KVD_UNAVAILABLE", "STALE_EPOCH", "PEER_LOST"})
"""A new kvd knows no transfer of the old one's, and no engine before it has attached again."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the client gets, and how."""

    answered: bool | None = True
    """With the right tokens; False: by an error; None: whichever comes first."""
    path: str = "pair"
    """Of an answer. "pair": the engines that were chosen first, undisturbed; "elsewhere": at least one more
    attempt; "either"; "alone": computed at decode in the end."""
    reasons: frozenset[str] = frozenset()
    """Of attempts that failed, or of the error; any of them."""
    expiries: Set[str] = frozenset()
    """Deadlines of kvd that may have run out."""
    back: float = settings.LEASE_S + settings.SLACK_S
    """Seconds from the answer and the end of the fault until every block is back."""


PAIR: Final = Expected()


def _elsewhere(*reasons: str, expiries: frozenset[str] = frozenset()) -> Expected:
    return Expected(path="elsewhere", reasons=frozenset(reasons), expiries=expiries)


def expected(cell: Cell) -> Expected:
    """What must come of a cell that can happen."""
    fault, phase = cell.fault, cell.phase
    if fault is Fault.CANCEL:
        return Expected(answered=False, reasons=frozenset({"CANCELLED"}))
    if fault is Fault.PROXY_KILLED:
        return _proxy_killed(cell)
    if fault in (Fault.P_KILLED, Fault.P_RESTARTED, Fault.D_KILLED, Fault.D_RESTARTED):
        return _engine_gone(cell)
    if fault in (Fault.P_STOPPED, Fault.D_STOPPED, Fault.KVD_STOPPED):
        return _stopped(cell)
    if fault is Fault.KVD_KILLED:
        return _kvd_killed(cell)
    if fault is Fault.LINK_FAILS:
        return _elsewhere("TRANSFER_FAILED")
    if fault is Fault.LINK_HANGS:
        return _elsewhere("TRANSFER_EXPIRED", expiries=frozenset({"transfer"}))
    if fault is Fault.P_END_DROPPED:  # said again after one to two leases; the answer does not wait for it
        return Expected(back=2 * settings.LEASE_S + settings.SLACK_S)
    if fault is Fault.CLOCK_P and not cell.from_(Phase.QUEUED):
        # Decode's locator looks an hour old. In WRITE decode hears from kvd that its producer failed, and may
        # be the first to tell the proxy.
        return _elsewhere("TICKET_EXPIRED", *(() if cell.read else ("PRODUCER_FAILED",)))
    if fault is Fault.CLOCK_D and not cell.from_(Phase.OFFER if cell.read else Phase.QUEUED):
        return _elsewhere("TICKET_EXPIRED")
    if fault is Fault.CLOCK_KVD:
        return Expected(path="alone", reasons=frozenset({"TICKET_EXPIRED"}))
    assert fault in {Fault.NONE, *_ENDS, *_LAYERS, Fault.CLOCK_P, Fault.CLOCK_D, Fault.CLOCK_PROXY}, (fault, phase)
    return PAIR


def _proxy_killed(cell: Cell) -> Expected:
    if cell.phase is Phase.REGISTERED:  # the new proxy hears of its engines about now
        return Expected(answered=None, reasons=frozenset({"NO_ENGINES", "UNAVAILABLE"}))
    return Expected(answered=False, reasons=frozenset({"UNAVAILABLE"}))


def _engine_gone(cell: Cell) -> Expected:
    prefill = cell.fault in (Fault.P_KILLED, Fault.P_RESTARTED)
    if prefill and cell.from_(Phase.NOTICE):
        return PAIR  # its part is done
    if cell.phase is Phase.REGISTERED:
        return Expected(path="either", reasons=_GONE)
    return _elsewhere(*_GONE)


def _stopped(cell: Cell) -> Expected:
    """For two TTLs; an engine is evicted meanwhile. What then goes on is refused: it is too late."""
    if cell.fault is Fault.KVD_STOPPED:
        return PAIR  # time in which it did not run has not passed for its transfers
    prefill = cell.fault is Fault.P_STOPPED
    if prefill and cell.from_(Phase.NOTICE):
        return PAIR
    asked = cell.from_(Phase.QUEUED if prefill else Phase.DONE if cell.read else Phase.QUEUED)
    deadline = "accept" if not prefill else "park" if cell.read and cell.phase is Phase.OFFER else "lease"
    # An engine that is not asked before it goes on may have been listed again, or not yet.
    return Expected(path="elsewhere" if asked else "either", reasons=_GONE | {"TRANSFER_EXPIRED"}, expiries={deadline})


def _kvd_killed(cell: Cell) -> Expected:
    if cell.from_(Phase.FIRST_STEP):
        return PAIR
    held = cell.from_(Phase.DONE if cell.read else Phase.QUEUED)
    return Expected(path="elsewhere" if held else "either", reasons=_NO_KVD)
