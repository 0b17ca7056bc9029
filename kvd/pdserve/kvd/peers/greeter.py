"""What this daemon says of itself in a greeting, and what the answer tells of the other side's clocks."""

import importlib.metadata
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.messages import ClockOffset, Greeting
from pdserve.kvd.types import PROTOCOL
from pdserve.runtime.clock import Clock, boot_id

BEAT_S: Final = 1.0
"""How long this side is silent on an open link at most."""


class Greeter:
    """See the module. `address` gives where this daemon is reached."""

    def __init__(self, epoch: str, clock: Clock, address: Callable[[], str]) -> None:
        self._clock = clock
        self._address = address
        version, node = importlib.metadata.version("pdserve"), socket.gethostname()
        self._me = Greeting(epoch, version, PROTOCOL, node, "", boot_id(), 0, 0, beat_ms=round(BEAT_S * 1000))

    def greeting(self, link: Link | None = None) -> Greeting:
        """As of now; of a stream that is no link's where there is none."""
        me = replace(
            self._me,
            address=self._address(),
            monotonic_ns=self._clock.monotonic_ns(),
            unix_ns=self._clock.unix_ns(),
        )
        if link is None:
            return me
        return replace(me, link=link.number, held=link.held, received=link.received)

    def offset(self, peer: Greeting, began_ns: int) -> ClockOffset:
        """How far a peer's clocks are ahead. It wrote its stamps between `began_ns` (monotonic) and now: half-way, give
        or take that half."""
        ended, unix = self._clock.monotonic_ns(), self._clock.unix_ns()
        half = (ended - began_ns) // 2
        if peer.boot_id == self._me.boot_id:
            return ClockOffset(0, peer.unix_ns - (unix - half), 0)
        return ClockOffset(peer.monotonic_ns - (began_ns + half), peer.unix_ns - (unix - half), half)
