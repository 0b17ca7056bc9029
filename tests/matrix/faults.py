"""What strikes a request that is held in a phase: signals, lost messages, a link that fails, a clock that jumps.

kvd tells the consumer's scheduler of an end first, then the producer's.
"""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pdserve.client import AsyncStream
from pdserve.runtime.failpoints import Point
from tests.matrix.fleet import Fleet, until
from tests.matrix.phases import Held, Where

_HOUR: Final = "return(3600)"
_NOTICED_S: Final = 2.0
"""Longest wait for the others to notice: the request is released only then, so that it is not over before."""


class Fault(enum.Enum):
    """By its name in docs/faults.md."""

    NONE = "none"
    """The baseline: nothing may fail without a fault."""
    CANCEL = "client cancels"
    P_KILLED = "P killed"
    D_KILLED = "D killed"
    P_RESTARTED = "P restarted"
    D_RESTARTED = "D restarted"
    P_STOPPED = "P stopped"
    D_STOPPED = "D stopped"
    KVD_STOPPED = "kvd stopped"
    KVD_KILLED = "kvd killed"
    PROXY_KILLED = "proxy killed"
    END_DROPPED = "end dropped"
    P_END_DROPPED = "end for P dropped"
    END_TWICE = "end duplicated"
    END_LATE = "end reordered"
    LAYER_DROPPED = "layer notice dropped"
    LAYER_TWICE = "layer notice duplicated"
    LAYER_LATE = "layer notice reordered"
    LINK_FAILS = "transport error"
    LINK_HANGS = "transport never completes"
    CLOCK_P = "clock step at P"
    CLOCK_D = "clock step at D"
    CLOCK_KVD = "clock step at kvd"
    CLOCK_PROXY = "clock step at the proxy"


@dataclass(frozen=True, slots=True)
class Armed:
    """A fault that a failpoint makes."""

    where: Where
    point: Point
    terms: str

    def hits(self, held: Held) -> bool:
        """Whether it strikes at the point where the request waits."""
        return self.point is held.point

    async def strike(self, held: Held) -> None:
        """Arms it."""
        failpoints = held.fleet.members[held.member(self.where)].failpoints
        if self.hits(held):
            return  # the operation that waits there is the one that never ends
        await failpoints.arm(self.point, self.terms)
        if self.point is Point.CLOCK and self.where != "kvd":
            await failpoints.awaited(self.point, fired=1)  # a beat reads it; kvd does at an accept only

    async def unproven(self, held: Held) -> str:
        """Why it is not shown that the fault struck; empty where it is."""
        name = held.member(self.where)
        count = await held.fleet.members[name].failpoints.count(self.point)
        return "" if count.fired else f"{self.point.value} at {name} never fired ({count})"


ARMED: Final = {
    Fault.END_DROPPED: Armed("kvd", Point.KVD_TELL_SCHEDULER, "1*drop"),
    Fault.P_END_DROPPED: Armed("kvd", Point.KVD_TELL_SCHEDULER, "1*off->1*drop"),
    Fault.END_TWICE: Armed("kvd", Point.KVD_TELL_SCHEDULER, "1*twice"),
    Fault.END_LATE: Armed("kvd", Point.KVD_TELL_SCHEDULER, "1*late"),
    Fault.LAYER_DROPPED: Armed("prefill", Point.CONNECTOR_NOTICE, "1*off->3*drop"),
    Fault.LAYER_TWICE: Armed("prefill", Point.CONNECTOR_NOTICE, "twice"),
    Fault.LAYER_LATE: Armed("prefill", Point.CONNECTOR_NOTICE, "1*off->2*late"),
    Fault.LINK_FAILS: Armed("kvd", Point.KVD_COPIED, "1*error(TRANSFER_FAILED)"),
    Fault.LINK_HANGS: Armed("kvd", Point.KVD_LINK, "1*pause"),
    Fault.CLOCK_P: Armed("prefill", Point.CLOCK, _HOUR),
    Fault.CLOCK_D: Armed("decode", Point.CLOCK, _HOUR),
    Fault.CLOCK_KVD: Armed("kvd", Point.CLOCK, _HOUR),
    Fault.CLOCK_PROXY: Armed("proxy", Point.CLOCK, _HOUR),
}

STOPS: Final = frozenset({Fault.P_STOPPED, Fault.D_STOPPED, Fault.KVD_STOPPED})
"""A process stands still for a while and goes on."""


async def _killed(fleet: Fleet, name: str) -> None:
    engine_id = fleet.members[name].engine_id
    await fleet.kill(name)

    async def unnoticed() -> str:
        engines = (await fleet.describe()).engines
        if any(engine.engine_id == engine_id and not engine.ended for engine in engines):
            return f"kvd has not noticed that {name} is gone"
        listed = any(engine.engine_id == engine_id for engine in (await fleet.topology()).engines)
        return f"the proxy has not noticed that {name} is gone" if listed else ""

    await until(unnoticed, _NOTICED_S)


async def _restarted(fleet: Fleet, name: str) -> None:
    await fleet.kill(name)
    await fleet.spawn(name)


async def _stopped(fleet: Fleet, name: str) -> None:
    await fleet.stop(name)


_PLAYS: Final[dict[Fault, tuple[Where, Callable[[Fleet, str], Awaitable[None]]]]] = {
    Fault.P_KILLED: ("prefill", _killed),
    Fault.D_KILLED: ("decode", _killed),
    Fault.P_RESTARTED: ("prefill", _restarted),
    Fault.D_RESTARTED: ("decode", _restarted),
    Fault.P_STOPPED: ("prefill", _stopped),
    Fault.D_STOPPED: ("decode", _stopped),
    Fault.KVD_STOPPED: ("kvd", _stopped),
    Fault.KVD_KILLED: ("kvd", _restarted),
    Fault.PROXY_KILLED: ("proxy", _restarted),
}


async def strike(fault: Fault, held: Held, stream: AsyncStream | None) -> None:
    """Lets the fault happen to a request, and returns when those who should have noticed have; `stream`
    None: to one that is still to come."""
    if fault in ARMED:
        await ARMED[fault].strike(held)
    elif fault in _PLAYS:
        where, play = _PLAYS[fault]
        await play(held.fleet, held.member(where))
    elif fault is Fault.CANCEL:
        assert stream is not None, "nobody can cancel what was not asked"
        await stream.aclose()
        await until(lambda: _going_on(held.fleet), _NOTICED_S)


async def _going_on(fleet: Fleet) -> str:
    """What still works for a request that was cancelled; in words."""
    if going := [t.transfer_id.hex() for t in await fleet.transfers() if not t.reason]:
        return f"transfers {going} go on"
    return "the proxy drives the request" if (await fleet.topology()).in_flight else ""


async def unproven(fault: Fault, held: Held) -> str:
    """Why it is not shown that the fault struck; a signal and a cancelled call prove themselves."""
    return await ARMED[fault].unproven(held) if fault in ARMED else ""
