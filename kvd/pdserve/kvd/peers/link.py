"""One link: the row of messages between two daemons, over all the streams that carry it. Pure but for the event
that its writer waits for.

    CONNECTING ──opened──▶ OPEN ◀──resumed── AWAY ──grace over──▶ lost
         └─ never opened ─▶ lost  └─stream gone─▶┘

Messages are numbered and kept until the peer has said that it took them; a stream that follows another within
the grace goes on where the peer stands. What cannot go on is lost as a whole, and begins anew with a higher number:
nothing of one link is ever taken for another's.
"""

import asyncio
import enum
from collections import deque
from typing import Final

from pdserve.kvd.peers.messages import ClockOffset, Frame, Greeting, Message
from pdserve.rpc.errors import InvalidRequest, PdserveError, Unavailable

_ACK_EVERY: Final = 64
"""Messages after which a silent side says how far it is."""


class LinkState(enum.Enum):
    """Where a link is."""

    CONNECTING = "connecting"
    """Nothing is held; what is sent waits for the first stream."""
    OPEN = "open"
    AWAY = "away"
    """Held without a stream, within the grace."""


class Link:
    """See the module. `peer` is what the peer has said of itself last."""

    def __init__(self, address: str, max_outbox: int) -> None:
        """`address`: where it can be called; empty where it cannot."""
        self.address = address
        self.state = LinkState.CONNECTING
        self.peer: Greeting | None = None
        self.number = 0
        """Of the link that the two had last."""
        self.received = 0
        """Last message taken."""
        self.clock = ClockOffset()
        self.introduced: dict[str, int] = {}
        """Engines of ours that the peer knows, and with how many regions."""
        self.called = False
        """Whether this side made the present stream, or the last."""
        self.heard_at = 0.0
        """When the present stream brought anything last."""
        self.dialing = False
        self.dial_at: float | None = None
        self.give_up_at: float | None = None
        self.failures = 0
        """Calls since the last stream that came to nothing."""
        self.last_error: PdserveError | None = None
        self.resumed = 0
        """How often it went on over another stream."""
        self._max_outbox = max_outbox
        self._out: deque[tuple[int, Message]] = deque()
        self._sent = 0
        """How many of `_out` the present stream has taken."""
        self._next = 1
        self._said = 0
        """What the peer was told last of `received`."""
        self._urgent: deque[Message] = deque()
        self._ready = asyncio.Event()
        self.stream = 0
        """Counts the streams; the present one's name."""
        self._turned = asyncio.Event()

    def __repr__(self) -> str:
        """For logs."""
        return f"Link({self.name}, {self.state.value}, {self.number})"

    @property
    def epoch(self) -> str:
        """The peer's; empty until it has spoken."""
        return self.peer.epoch if self.peer is not None else ""

    @property
    def name(self) -> str:
        """The peer, for people."""
        return self.address or (self.peer.node if self.peer is not None else "") or self.epoch

    @property
    def held(self) -> bool:
        """Whether there is something to go on with."""
        return self.state is not LinkState.CONNECTING

    @property
    def beats(self) -> float:
        """How long the peer is silent at most, as it says; seconds."""
        return self.peer.beat_ms / 1000 if self.peer is not None else 0.0

    @property
    def waiting(self) -> int:
        """Messages that the peer has not said it took."""
        return len(self._out)

    def send(self, message: Message) -> bool:
        """Adds a message to the row; False where the peer leaves too many unsaid."""
        self._out.append((self._next, message))
        self._next += 1
        self._ready.set()
        return len(self._out) <= self._max_outbox

    def goes_on(self, number: int, received: int) -> bool:
        """Whether a peer that holds link `number`, and took `received` messages of it, can be gone on with."""
        first = self._out[0][0] if self._out else self._next
        return self.held and number == self.number and first - 1 <= received < self._next

    def open(self, peer: Greeting, number: int, received: int, *, resumed: bool, urgent: Message | None = None) -> int:
        """A stream carries it from now on; that stream's name. `urgent` goes first."""
        self._turn()
        self.peer, self.state = peer, LinkState.OPEN
        self.address = self.address or peer.address
        self.dial_at = self.give_up_at = self.last_error = None
        self.failures = 0
        self._sent = 0
        self._urgent = deque([urgent] if urgent is not None else [])
        if resumed:
            self.resumed += 1
            self.acknowledged(received)
        else:
            self.number, self.received, self._said = number, 0, 0
        self._ready.set()
        return self.stream

    def away(self, give_up_at: float) -> None:
        """Its stream is gone."""
        self.state, self.give_up_at = LinkState.AWAY, give_up_at
        self._turn()  # whoever still writes is not its writer any more
        self._ready.set()

    def reset(self) -> None:
        """It is lost: nothing of it is held or sent any more."""
        self.state = LinkState.CONNECTING
        self._out.clear()
        self._sent, self._next, self.received, self._said = 0, 1, 0, 0
        self.introduced.clear()
        self.clock = ClockOffset()
        self._turn()
        self._ready.set()

    def take(self, frame: Frame) -> Message | None:
        """A frame that has come: its message; None where it has none, or was taken before.

        Raises:
            InvalidRequest: one is missing before it, or it speaks of messages that were not sent.
        """
        self.acknowledged(frame.received)
        if not frame.number:
            return frame.message
        if frame.number > self.received + 1:
            raise InvalidRequest(f"message {frame.number} after {self.received}: something between them is missing")
        if frame.number <= self.received:
            return None
        self.received = frame.number
        if self.received - self._said >= _ACK_EVERY:
            self._ready.set()
        return frame.message

    def acknowledged(self, received: int) -> None:
        """The peer has taken so many.

        Raises:
            InvalidRequest: more than there are.
        """
        if received >= self._next:
            raise InvalidRequest(f"the peer has taken message {received} of {self._next - 1}")
        while self._out and self._out[0][0] <= received:
            self._out.popleft()
            self._sent = max(0, self._sent - 1)

    def frame(self, stream: int) -> Frame | None:
        """The next frame for a stream; None where there is none now.

        Raises:
            Unavailable: another stream has taken over, or the link is lost.
        """
        if stream != self.stream:
            raise Unavailable("the link goes on over another stream, or not at all")
        number, message = 0, None
        if self._urgent:
            message = self._urgent.popleft()
        elif self._sent < len(self._out):
            number, message = self._out[self._sent]
            self._sent += 1
        elif self.received - self._said < _ACK_EVERY:
            return None
        self._said = self.received
        return Frame(number, self.received, message)

    def beat(self, stream: int) -> Frame:
        """A frame that says no more than that this side lives, and what it took.

        Raises:
            Unavailable: another stream has taken over, or the link is lost.
        """
        if stream != self.stream:
            raise Unavailable("the link goes on over another stream, or not at all")
        self._said = self.received
        return Frame(0, self.received, None)

    async def next(self, stream: int) -> Frame:
        """The next frame for a stream, when there is one.

        Raises:
            Unavailable: another stream has taken over, or the link is lost.
        """
        while (frame := self.frame(stream)) is None:
            self._ready.clear()
            await self._ready.wait()
        return frame

    async def left(self, stream: int) -> None:
        """Until the link goes on without a stream: over another one, or not at all."""
        while stream == self.stream:
            await self._turned.wait()

    def _turn(self) -> None:
        self.stream += 1
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()
