"""The catalogue of failpoints: every place of the system that can be made to fail by name."""

import enum
from typing import Final

from pdserve.runtime.failpoints.terms import Action

_ANYWHERE: Final = frozenset({Action.OFF, Action.DELAY, Action.PAUSE, Action.STOP, Action.KILL})


class Kind(enum.Enum):
    """What a point is, and so what can happen there."""

    PLACE = _ANYWHERE | {Action.ERROR}
    """The work that goes by."""
    MESSAGE = _ANYWHERE | {Action.DROP, Action.TWICE, Action.LATE}
    """One message after the other goes by."""
    VALUE = frozenset({Action.OFF, Action.RETURN})
    """A number is asked for."""


class Point(enum.Enum):
    """A point's value is its name; the line under it says where it is."""

    PROXY_DISPATCH = "proxy.dispatch"
    """A pair was chosen; no leg is open yet."""
    PROXY_BETWEEN = "proxy.between"
    """READ: prefill has offered, decode is not asked yet."""
    PROXY_READY = "proxy.ready"
    """Prefill's word that it has offered is here; the attempt does not count on it yet."""
    PROXY_TOKEN = "proxy.token"
    """Decode's tokens are here, the client has not seen them."""
    PREFILL_RECEIVED = "prefill.received"
    """A prefill request came in; its engine knows nothing of it."""
    PREFILL_READY = "prefill.ready"
    """The blocks are on offer; the proxy is not told yet."""
    PREFILL_RELEASED = "prefill.released"
    """kvd has ended the transfer; the proxy is not told yet."""
    DECODE_RECEIVED = "decode.received"
    """A decode request came in; its engine knows nothing of it."""
    DECODE_TEXT = "decode.text"
    """The engine has said a token and its text; the service has not looked at it."""
    DECODE_TOKEN = "decode.token"
    """The engine has a token; the proxy is not told yet."""
    BEAT = "beat"
    """A service's beat on its way to the proxy."""
    CONNECTOR_BEGIN = "connector.begin"
    """A producer's `begin` on its way to kvd (WRITE)."""
    CONNECTOR_OFFER = "connector.offer"
    """A producer's `offer` on its way to kvd."""
    CONNECTOR_ACCEPT = "connector.accept"
    """A consumer's `accept` on its way to kvd."""
    CONNECTOR_NOTICE = "connector.notice"
    """A worker's notice of a step or a layer on its way to kvd (WRITE)."""
    SIM_ARRIVED = "sim.arrived"
    """A request has come to the simulated engine, which has given it no blocks yet."""
    SIM_LANDED = "sim.landed"
    """A hand-over is over; the simulated engine has not chosen its request for a step yet."""
    SIM_STEP = "sim.step"
    """The simulated engine is about to compute a step."""
    SIM_LAYER = "sim.layer"
    """The simulated engine has computed a layer; kvd is not told yet (WRITE)."""
    KVD_MEMORY = "kvd.memory"
    """A rank hands its memory in."""
    KVD_HEARD = "kvd.heard"
    """A message of an engine has come, before kvd's books know of it."""
    KVD_POST = "kvd.post"
    """An operation is posted in the books; no session is asked for it yet."""
    KVD_LINK = "kvd.link"
    """The simulated link is about to carry an operation's bytes; only the session's end cancels it."""
    KVD_COPIED = "kvd.copied"
    """An operation's bytes are in place; the books do not know yet."""
    KVD_TELL_SCHEDULER = "kvd.tell.scheduler"
    """A transfer's end, or a fence, on its way to an engine's scheduler, which frees blocks by it."""
    KVD_TELL_WORKER = "kvd.tell.worker"
    """The same on its way to one rank, which waits for fences."""
    KVD_TELL_HOST = "kvd.tell.host"
    """The same on its way to the service beside an engine, which answers the proxy by it."""
    CLOCK = "clock"
    """Seconds by which this process's wall clock is off; not its monotonic one."""

    @property
    def kind(self) -> Kind:
        """What can happen there."""
        return _KINDS.get(self, Kind.PLACE)


_KINDS: Final = {
    Point.CLOCK: Kind.VALUE,
    Point.BEAT: Kind.MESSAGE,
    Point.CONNECTOR_BEGIN: Kind.MESSAGE,
    Point.CONNECTOR_OFFER: Kind.MESSAGE,
    Point.CONNECTOR_ACCEPT: Kind.MESSAGE,
    Point.CONNECTOR_NOTICE: Kind.MESSAGE,
    Point.KVD_TELL_SCHEDULER: Kind.MESSAGE,
    Point.KVD_TELL_WORKER: Kind.MESSAGE,
    Point.KVD_TELL_HOST: Kind.MESSAGE,
}
