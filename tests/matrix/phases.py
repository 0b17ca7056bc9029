"""The moments of a request's life at which a fault strikes; each is reached at a pause, never slept for."""

import enum
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.client import Mode
from pdserve.runtime.failpoints import Point
from tests.matrix.control import COMMAND_S, Failpoints
from tests.matrix.fleet import Fleet, Pair, until

Where = Literal["proxy", "prefill", "decode", "kvd"]
"""A part of the request's path; which member plays it depends on the pair."""


def member(where: Where, pair: Pair) -> str:
    """The name of the member that plays the part."""
    return {"prefill": pair.prefill, "decode": pair.decode}.get(where, where)


@dataclass(frozen=True, slots=True)
class Pause:
    """A point, and the terms that let a request wait there."""

    where: Where
    point: Point
    terms: str


class Phase(enum.Enum):
    """In the order of a request's life."""

    REGISTERED = "registered"
    """All engines are there; the request comes when the fault has struck."""
    DISPATCHED = "dispatched"
    """The proxy has chosen a pair, neither engine has heard of the request."""
    QUEUED = "P queued"
    """Prefill's service has the request, its engine does not."""
    COMPUTING = "P computing"
    """Prefill's engine computes the second of three chunks."""
    LAYER = "layer done"
    """Layers of the first chunk are pushed, prefill's engine is within the second."""
    DONE = "P done"
    """Prefill's blocks are on offer; the proxy does not know."""
    BETWEEN = "D not dispatched"
    """The proxy has prefill's ticket and has not asked decode."""
    OFFER = "offer on its way"
    """Prefill has computed all, decode has accepted; prefill's offer is on the way to kvd."""
    WAITING = "D waiting"
    """Decode has reserved blocks; its word is on the way to kvd."""
    POSTED = "transfer posted"
    """An operation of one rank is on the link."""
    NOTICE = "notice in flight"
    """Every byte has landed; no engine has been told."""
    FIRST_STEP = "first decode step"
    """Decode has the KV and is about to compute its first step."""
    STREAMING = "third token"
    """Two tokens have reached the client, the third is in the proxy."""


_PAUSES: Final[dict[Phase, Pause | None]] = {
    Phase.REGISTERED: None,
    Phase.DISPATCHED: Pause("proxy", Point.PROXY_DISPATCH, "1*pause"),
    Phase.QUEUED: Pause("prefill", Point.PREFILL_RECEIVED, "1*pause"),
    Phase.COMPUTING: Pause("prefill", Point.SIM_STEP, "1*off->1*pause"),
    Phase.LAYER: Pause("prefill", Point.SIM_LAYER, "5*off->1*pause"),
    Phase.DONE: Pause("prefill", Point.PREFILL_READY, "1*pause"),
    Phase.BETWEEN: Pause("proxy", Point.PROXY_BETWEEN, "1*pause"),
    Phase.OFFER: Pause("prefill", Point.CONNECTOR_OFFER, "1*pause"),
    Phase.WAITING: Pause("decode", Point.CONNECTOR_ACCEPT, "1*pause"),
    Phase.POSTED: Pause("kvd", Point.KVD_LINK, "1*pause"),
    Phase.NOTICE: Pause("kvd", Point.KVD_TELL_SCHEDULER, "pause"),
    Phase.FIRST_STEP: Pause("decode", Point.SIM_STEP, "1*pause"),
    Phase.STREAMING: Pause("proxy", Point.PROXY_TOKEN, "2*off->1*pause"),
}

_PAST_PREFILL: Final = (Phase.NOTICE, Phase.FIRST_STEP, Phase.STREAMING)
"""Prefill's part is done, and the proxy has been told so. In WRITE decode does not wait for that word."""
_AT_PREFILL: Final = (Phase.QUEUED, Phase.COMPUTING, Phase.LAYER)
"""In WRITE decode's leg is open meanwhile, and accepts."""


class NotHeld(AssertionError):
    """The fault has not struck yet, and cannot: the request is not where it should wait."""


@dataclass(frozen=True, slots=True)
class Held:
    """A request that is held in a phase."""

    fleet: Fleet
    phase: Phase
    pair: Pair
    mode: Mode

    @property
    def pause(self) -> Pause | None:
        """Where; None before there is a request."""
        return _PAUSES[self.phase]

    def member(self, where: Where) -> str:
        """The name of the member that plays the part."""
        return member(where, self.pair)

    async def arm(self) -> None:
        """Lets the next request wait there."""
        if self.pause is not None:
            await self._failpoints().arm(self.pause.point, self.pause.terms)
        if self.phase in _PAST_PREFILL:
            await self.fleet.members["proxy"].failpoints.arm(Point.PROXY_READY, "delay(0)")  # so that it is counted

    async def reached(self) -> None:
        """The request waits there.

        Raises:
            NotHeld: it has not come: it was given to another pair.
        """
        if self.pause is None:
            return
        count = await self._failpoints().awaited(self.pause.point, waiting=1)
        if not count.waiting:
            raise NotHeld(f"no request came to {self.phase.value}: {count}")
        if self.phase in _PAST_PREFILL:
            await self._told()
        await until(self._early, COMMAND_S)

    async def _told(self) -> None:
        count = await self.fleet.members["proxy"].failpoints.awaited(Point.PROXY_READY, fired=1)
        if not count.fired:
            raise NotHeld(f"the proxy has not heard from prefill at {self.phase.value}")

    @property
    def point(self) -> Point | None:
        """Where; None before there is a request."""
        return None if self.pause is None else self.pause.point

    async def let_go(self) -> None:
        """Lets the request go on, and no later one wait; nothing where the process is gone."""
        if self.pause is not None and self.fleet.alive(self.member(self.pause.where)):
            await self._failpoints().disarm(self.pause.point)

    async def _early(self) -> str:
        """What the other leg has still to do until the phase is the same in every run; in words."""
        transfers = await self.fleet.transfers()
        accepts = self.phase is Phase.OFFER or (self.mode == "write" and self.phase in _AT_PREFILL)
        if accepts and not any(t.consumer_states for t in transfers):
            return "decode has not accepted"
        if self.phase is Phase.LAYER and not any(t.bytes_moved for t in transfers):
            return "no layer has landed"
        if (
            self.phase is Phase.OFFER
            and self.mode == "write"
            and any(t.bytes_moved < t.bytes_wanted for t in transfers)
        ):
            return "layers are under way"
        if self.phase in (Phase.WAITING, Phase.POSTED) and not any(t.producer_state == "complete" for t in transfers):
            return "prefill has not offered"
        return ""

    def _failpoints(self) -> Failpoints:
        assert self.pause is not None
        return self.fleet.members[self.member(self.pause.where)].failpoints
