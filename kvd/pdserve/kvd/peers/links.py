"""All links of a daemon: who is called, whose call stands, when one is given up. Pure.

One stream per pair: where both call at once, the call of the daemon with the lower epoch stands. A daemon that is
restarted at the same address is another peer, and what was open with the old one is lost at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from pdserve.kvd.peers.link import Link, LinkState
from pdserve.kvd.peers.messages import Greeting, Message
from pdserve.kvd.types import PROTOCOL
from pdserve.rpc.errors import (
    ConfigError,
    IncompatibleEngines,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PeerLost,
    TicketRefused,
    Unauthenticated,
    Unavailable,
)

_REFUSALS: Final = (InvalidRequest, Unauthenticated, TicketRefused, IncompatibleEngines, ConfigError)
"""Errors that another call would meet again."""
_SECOND_CALL_S: Final = 0.2
_LINK: Final = "link"
"""Metadata of a refusal: the link that the two had last, as the one who refused knows it. Nobody has proved that."""
_MOST_LINKS: Final = 1 << 48
"""More than two daemons ever have; a number above it is nobody's."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """How long a link may take, in seconds, and how much it keeps."""

    connect: float = 5.0
    """Until the first stream of a link: then what waits for it fails."""
    grace: float = 2.0
    """For which a link without a stream is held."""
    backoff_first: float = 0.05
    """Pause after the first call that came to nothing; doubled by each."""
    backoff_most: float = 1.0
    """Longest pause."""
    silence: float = 6.0
    """Longest silence of a peer, whose stream is then taken for gone, whatever its kernel still answers; three of the
    pauses at least that it has said it makes."""
    max_outbox: int = 65_536
    """Messages that the peer has not said it took."""
    max_links: int = 1024
    """Peers."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} must be above 0, not {getattr(self, field.name)}")


class Links:
    """See the module. `lost` is told of each link that is lost, before anything else is done with it: everything
    that depends on it must end there, and nothing may be sent on it."""

    def __init__(
        self,
        epoch: str,
        limits: LinkLimits,
        lost: Callable[[Link, PdserveError, float], None],
        jitter: Callable[[], float],
    ) -> None:
        """`epoch` is this daemon's; `jitter` gives numbers from 0 to 1."""
        self._epoch = epoch
        self._limits = limits
        self._lost = lost
        self._jitter = jitter
        self._links: list[Link] = []

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def towards(self, address: str, now: float) -> Link:
        """The link to the daemon at an address; one that is not there yet is called.

        Raises:
            Overloaded: too many.
        """
        found = self._at(address)
        if found is None:
            found = self._new(address, now)
            found.dial_at = now
        return found

    def send(self, link: Link, message: Message, now: float) -> None:
        """Sends in order; what a lost link leaves unsaid is lost with it."""
        if not link.send(message) and link in self._links:
            self._lose(link, PeerLost(f"the daemon at {link.name} does not take what is sent"), now, forget=True)

    # -- calling ----------------------------------------------------------------------------

    def dials(self, now: float) -> list[Link]:
        """Whom to call now; each call ends in `welcomed` or `dial_failed`."""
        due = [link for link in self._links if link.dial_at is not None and link.dial_at <= now and not link.dialing]
        for link in due:
            link.dialing, link.dial_at = True, None
        return due

    def check_wanted(self, link: Link) -> None:
        """For a call that has got through: is it to be greeted? A greeting of a link that was given up meanwhile would
        undo at the peer the one that has taken its place.

        Raises:
            Unavailable: the call is not wanted any more.
        """
        if link not in self._links or link.state is LinkState.OPEN:
            raise Unavailable("the call is not wanted any more")

    def welcomed(self, link: Link, peer: Greeting, now: float, urgent: Message | None = None) -> int:
        """A call was answered; the stream's name.

        Raises:
            Unavailable: the call is not wanted any more.
            InvalidRequest: the answer makes no sense.
            IncompatibleEngines: another protocol.
        """
        self.check_wanted(link)
        self._check(peer)
        if link.held and link.epoch != peer.epoch:
            self._lose(link, PeerLost(f"the daemon at {link.name} was restarted"), now)
        for other in [o for o in self._links if o is not link and o.epoch == peer.epoch]:
            self._lose(other, PeerLost(f"the daemon at {other.name} is at {link.name} now"), now, forget=True)
        resumed = peer.held and link.goes_on(peer.link, peer.received)
        if link.held and not resumed:
            self._lose(link, PeerLost(f"the daemon at {link.name} does not hold the link any more"), now)
        link.dialing, link.called, link.heard_at = False, True, now
        return link.open(peer, peer.link, peer.received, resumed=resumed, urgent=urgent)

    def dial_failed(self, link: Link, error: PdserveError, now: float) -> None:
        """A call came to nothing."""
        link.dialing = False
        if link not in self._links or link.state is LinkState.OPEN:
            return  # the peer's own call has come meanwhile
        link.last_error = error
        known = _number(error.metadata.get(_LINK, ""))
        if known > link.number:
            if link.held:
                self._lose(link, PeerLost(f"the daemon at {link.name} does not hold the link any more"), now)
            link.number, link.dial_at = known, now
            link.give_up_at = link.give_up_at or now + self._limits.connect
        elif isinstance(error, _REFUSALS):
            self._lose(link, error, now, forget=True)
        else:
            link.failures += 1
            link.dial_at = now + self._pause(link)

    def _pause(self, link: Link) -> float:
        limits = self._limits
        pause: float = min(limits.backoff_most, limits.backoff_first * 2.0 ** min(link.failures - 1, 20))
        return pause * (0.5 + 0.5 * self._jitter())

    # -- being called -----------------------------------------------------------------------

    def hello(self, peer: Greeting, now: float) -> tuple[Link, int, bool]:
        """A peer calls: its link, the stream's name, and whether the link goes on.

        Raises:
            IncompatibleEngines: another protocol.
            InvalidRequest: it is this daemon itself.
            Overloaded: too many links.
            Unavailable: this side's own call stands, or the peer's is older than the present link.
        """
        self._check(peer)
        link = next((one for one in self._links if one.epoch == peer.epoch), None)
        there = self._at(peer.address) if peer.address else None
        if there is not None and there is not link and there.epoch:
            self._lose(there, PeerLost(f"the daemon at {there.name} was restarted"), now, forget=link is not None)
            there.number = 0  # the new one has had no link
        link = link or there
        if link is not None and link.dialing and self._epoch < peer.epoch:
            raise Unavailable("both called at once, and the other call stands")
        if link is not None and peer.link < link.number:
            raise Unavailable("the call is older than the link", link=str(link.number))
        link = link or self._new(peer.address, now)
        resumed = peer.held and link.goes_on(peer.link, peer.received)
        if link.held and not resumed:
            self._lose(link, PeerLost(f"the daemon at {link.name} does not hold the link any more"), now)
        number = link.number if resumed else max(link.number, peer.link) + 1
        link.called, link.heard_at = False, now
        return link, link.open(peer, number, peer.received, resumed=resumed), resumed

    def _check(self, peer: Greeting) -> None:
        if peer.protocol != PROTOCOL:
            raise IncompatibleEngines(f"protocol {peer.protocol}; this kvd speaks {PROTOCOL}")
        if peer.epoch == self._epoch:
            raise InvalidRequest("the peer's address is this daemon's own")

    # -- losing -----------------------------------------------------------------------------

    def heard(self, link: Link, now: float) -> None:
        """Its present stream has brought something."""
        link.heard_at = now

    def _silent_at(self, link: Link) -> float | None:
        """When an open link is silent for too long."""
        if link.state is not LinkState.OPEN:
            return None
        return link.heard_at + max(self._limits.silence, 3 * link.beats)

    def _fall_silent(self, link: Link, now: float) -> None:
        """A daemon whose loop hangs behind a kernel that still answers. Held for the grace, like one whose stream is
        gone: should it wake up, the link goes on."""
        link.last_error = Unavailable(f"it has said nothing for {now - link.heard_at:.1f} s")
        self.dropped(link, link.stream, now)

    def dropped(self, link: Link, stream: int, now: float) -> None:
        """A stream is gone; if it carried the link, that is held for the grace."""
        if link in self._links and link.state is LinkState.OPEN and link.stream == stream:
            link.away(now + self._limits.grace)
            if link.address:
                # The side that called last calls first, so that both seldom do at once.
                link.dial_at = now if link.called else now + min(_SECOND_CALL_S, self._limits.grace / 8)

    def broken(self, link: Link, stream: int, error: PdserveError, now: float) -> None:
        """What came on a stream cannot be: the link is lost."""
        if link in self._links and link.stream == stream:
            self._lose(link, PeerLost(f"the link to {link.name} is broken: {error.message}"), now, forget=True)

    def expire(self, now: float) -> None:
        """Gives up what is due."""
        for link in list(self._links):
            if (silent_at := self._silent_at(link)) is not None and silent_at <= now:
                self._fall_silent(link, now)
            if link.state is LinkState.OPEN or link.give_up_at is None or link.give_up_at > now:
                continue
            why = f": {link.last_error.message}" if link.last_error is not None else ""
            if link.held:
                error = PeerLost(f"no way to the daemon at {link.name} for {self._limits.grace:g} s{why}")
            else:
                error = PeerLost(f"the daemon at {link.name} was not reached within {self._limits.connect:g} s{why}")
            self._lose(link, error, now, forget=True)

    def next_deadline(self) -> float | None:
        """When `expire` or `dials` has something to do."""
        times = [link.give_up_at for link in self._links if link.state is not LinkState.OPEN]
        times += [link.dial_at for link in self._links if not link.dialing]
        times += [self._silent_at(link) for link in self._links]
        return min((when for when in times if when is not None), default=None)

    def put_off(self, seconds: float) -> None:
        """The daemon did not run for so long: nobody could have come."""
        for link in self._links:
            link.heard_at += seconds
            if link.give_up_at is not None:
                link.give_up_at += seconds

    def _lose(self, link: Link, error: PdserveError, now: float, *, forget: bool = False) -> None:
        if forget:
            self._links.remove(link)
        self._lost(link, error, now)
        link.reset()

    def _new(self, address: str, now: float) -> Link:
        if len(self._links) >= self._limits.max_links:
            raise Overloaded(f"{len(self._links)} peers are too many")
        link = Link(address, self._limits.max_outbox)
        link.give_up_at = now + self._limits.connect
        self._links.append(link)
        return link

    def _at(self, address: str) -> Link | None:
        return next((link for link in self._links if link.address == address), None)


def _number(text: str) -> int:
    """Of a link; 0 where it is none."""
    number = int(text) if text.isdecimal() and len(text) < 20 else 0
    return number if number < _MOST_LINKS else 0
