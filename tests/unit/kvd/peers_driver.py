"""Two cores and the link between them, without I/O: time, copies, streams and frames by hand, and a model of what
every block holds. `p` engines live on side 0, `d` engines on side 1."""

from collections import deque
from dataclasses import dataclass, field, replace

from pdserve.kvd.client.messages import Accept, Begin, Cancel, End, Offer, Outcome, Renew, Retract
from pdserve.kvd.consuming import Source
from pdserve.kvd.effects import CancelOp, Post, TearDown, Tell, Unmap
from pdserve.kvd.leases import Leases
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk, StepBegin, StepEnd
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.peers.link import Link, LinkState
from pdserve.kvd.peers.links import LinkLimits
from pdserve.kvd.peers.messages import Frame, Greeting
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.testing import plain_layout
from pdserve.kvd.transfers import Transfers
from pdserve.kvd.types import PROTOCOL, MemoryKind, Mode
from pdserve.rpc.errors import PdserveError, Unavailable

LAYERS, BLOCKS = 2, 12
ADDRESSES = ("node-a:1", "node-b:1")


@dataclass(eq=False)
class Side:
    """One daemon without its I/O."""

    index: int
    epoch: str
    registry: Registry
    transfers: Transfers
    desk: Desk
    posts: dict[int, Post] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)
    ends: dict[tuple[str, str], End] = field(default_factory=dict)


@dataclass(eq=False)
class Stream:
    """One stream, and what is under way on it in each direction."""

    links: list[Link]
    names: list[int]
    """What each side calls it."""
    frames: list[deque[Frame]]
    """To each side."""
    whole: bool = True


class TwoCores:
    """See the module."""

    def __init__(self, limits: Limits, links: LinkLimits) -> None:
        self.now = 100.0
        self._limits = limits
        self._link_limits = replace(links, silence=1e9)  # by hand, nobody speaks for speaking's sake
        self._epochs = 0
        self.streams: list[Stream] = []
        self.dialing: list[tuple[int, Link]] = []
        """Calls that have begun."""
        self.contents: dict[tuple[str, int, int], object] = {}
        self.expected: dict[bytes, int] = {}
        """Blocks of each prompt."""
        self.reads = 0
        self.sides = [self._side(0), self._side(1)]

    def _side(self, index: int) -> Side:
        self._epochs += 1
        registry, leases = Registry(), Leases()
        transfers = Transfers(registry, leases, self._limits)

        def check(accept: Accept) -> Source:
            engine, mode = accept.ticket.decode().split("|")
            return Source(engine, Mode(mode), {}, ADDRESSES[0])

        epoch = f"{(self._epochs * 7) % 10}-{self._epochs}"  # neither side is always the lower
        desk = Desk(epoch, transfers, self._link_limits, check, lambda: 0.5)
        desk.address = ADDRESSES[index]
        return Side(index, epoch, registry, transfers, desk)

    # -- engines ----------------------------------------------------------------------------

    def engine(self, side: int, engine_id: str) -> None:
        """A running engine with its memory."""
        at = self.sides[side]
        at.registry.hello(engine_id, 1, PROTOCOL, {})
        region = Region(BLOCKS * LAYERS * 64, MemoryKind.HOST, plain_layout(BLOCKS, LAYERS, 64, 16))
        at.registry.add_region(engine_id, 0, region)
        self.settle(at)

    def die(self, side: int, engine_id: str) -> None:
        """Its memory socket ends."""
        at = self.sides[side]
        at.transfers.engine_ended(engine_id, "died", self.now)
        at.desk.engine_gone(engine_id, "died", self.now, over=True)
        self.settle(at)

    def say(self, side: int, engine_id: str, message: Accept | Begin | Offer | Retract | Cancel | Renew) -> None:
        """An engine says something, as `Node` hears it."""
        at = self.sides[side]
        match message:
            case Begin():
                at.transfers.begin(engine_id, message, self.now)
            case Offer():
                at.transfers.offer(engine_id, message, self.now)
            case Accept():
                source = Source(*self._source(message), {}, ADDRESSES[0])
                elsewhere = at.desk.elsewhere(source)
                (at.desk.accept if elsewhere else at.transfers.accept)(engine_id, message, source, self.now)
            case Retract():
                if not at.desk.retract(engine_id, message, self.now):
                    at.transfers.retract(engine_id, message, self.now)
            case Cancel():
                at.desk.cancel(message, self.now)
            case Renew():
                at.desk.renew(engine_id, message, self.now)
        self.settle(at)

    @staticmethod
    def _source(accept: Accept) -> tuple[str, Mode]:
        engine, mode = accept.ticket.decode().split("|")
        return engine, Mode(mode)

    def step(self, engine_id: str, number: int, chunk: Chunk) -> None:
        """Notices of a whole step of an engine of side 0."""
        at = self.sides[0]
        at.transfers.notice(StepBegin(engine_id, 0, number, (chunk,)), self.now)
        at.transfers.notice(StepEnd(engine_id, 0, number), self.now)
        self.settle(at)

    # -- copies -----------------------------------------------------------------------------

    def finish(self, side: int, op_id: int, error: str = "") -> None:
        """A copy ends: reads what is in the source's blocks now."""
        at = self.sides[side]
        post = at.posts.pop(op_id)
        if not error:
            for layer in post.layers:
                for src, dst in zip(post.src_blocks, post.dst_blocks, strict=True):
                    self.contents[post.dst.engine_id, layer, dst] = self.contents.get((post.src.engine_id, layer, src))
                    self.reads += 1
        how = {"transport": "hand", "lanes": "by hand", "error": error}
        if not at.desk.op_ended(op_id, self.now, moved=1, ns=1, **how):
            at.transfers.op_ended(op_id, self.now, moved=1, ns=1, **how)
        self.settle(at)

    # -- the network ------------------------------------------------------------------------

    def call(self) -> None:
        """Whoever is to be called now is: the calls begin."""
        for at in self.sides:
            self.dialing += [(at.index, link) for link in at.desk.links.dials(self.now)]

    def answer(self, which: int, *, greeted: bool = True, welcomed: bool = True) -> None:
        """A call gets through, or not; the greeting arrives and the welcome does not, where one says so."""
        index, link = self.dialing.pop(which)
        caller, other = self.sides[index], self.sides[1 - index]
        if not greeted:
            caller.desk.links.dial_failed(link, Unavailable("no way"), self.now)
            self.settle(caller)
            return
        try:
            theirs, name, resumed = other.desk.links.hello(self._greeting(caller, link), self.now)
        except PdserveError as error:
            self.settle(other)
            caller.desk.links.dial_failed(link, error, self.now)
            self.settle(caller)
            return
        self.settle(other)
        welcome = self._greeting(other, theirs, held=resumed)
        if not welcomed:
            caller.desk.links.dial_failed(link, Unavailable("it broke"), self.now)
            other.desk.links.dropped(theirs, name, self.now)
            self.settle(other)
            self.settle(caller)
            return
        try:
            mine = caller.desk.links.welcomed(link, welcome, self.now)
        except PdserveError as error:
            caller.desk.links.dial_failed(link, error, self.now)
            other.desk.links.dropped(theirs, name, self.now)
        else:
            names, links = [mine, name], [link, theirs]
            if index:
                names.reverse()
                links.reverse()
            self.streams.append(Stream(links, names, [deque(), deque()]))
        self.settle(caller)
        self.settle(other)

    @staticmethod
    def _greeting(side: Side, link: Link, held: bool | None = None) -> Greeting:
        is_held = link.held if held is None else held
        address = ADDRESSES[side.index]
        return Greeting(side.epoch, "", PROTOCOL, "", address, "boot", 0, 0, link.number, is_held, link.received)

    def carry(self) -> None:
        """What each side has to say goes onto its streams; one that one side has left is over for the other too."""
        for stream in list(self.streams):
            if any(link.stream != name for link, name in zip(stream.links, stream.names, strict=True)):
                self._over(stream)
        for stream in self.streams:
            for index, link in enumerate(stream.links):
                while stream.whole and link.stream == stream.names[index]:
                    frame = link.frame(stream.names[index])
                    if frame is None:
                        break
                    stream.frames[1 - index].append(frame)

    def deliver(self, stream: Stream, side: int) -> None:
        """The next frame arrives."""
        frame = stream.frames[side].popleft()
        at = self.sides[side]
        at.desk.heard(stream.links[side], stream.names[side], frame, self.now)
        self.settle(at)

    def cut(self, stream: Stream, arrived: int) -> None:
        """A stream breaks after `arrived` more frames each way; both sides notice."""
        self.carry()
        if stream not in self.streams:
            return
        stream.whole = False
        for side in (0, 1):
            for _ in range(min(arrived, len(stream.frames[side]))):
                self.deliver(stream, side)
        self._over(stream)

    def _over(self, stream: Stream) -> None:
        self.streams.remove(stream)
        for side in (0, 1):
            self.sides[side].desk.links.dropped(stream.links[side], stream.names[side], self.now)
            self.settle(self.sides[side])

    def deliver_all(self) -> None:
        """Everything that is under way arrives, and what that gives rise to."""
        while True:
            self.carry()
            waiting = [(stream, side) for stream in self.streams for side in (0, 1) if stream.frames[side]]
            if not waiting:
                return
            self.deliver(*waiting[0])

    # -- time -------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Time passes, deadline by deadline."""
        until = self.now + seconds
        while (due := self._due()) is not None and due <= until:
            self.now = max(self.now, due)
            before = self._due()
            for at in self.sides:
                at.transfers.expire(self.now)
                at.desk.expire(self.now)
                self.settle(at)
            if self._due() == before:  # a call is due, which is the test's to make
                self.call()
        self.now = until

    def _due(self) -> float | None:
        times = [x for at in self.sides for x in (at.transfers.next_deadline(), at.desk.next_deadline())]
        return min((when for when in times if when is not None), default=None)

    # -- effects ----------------------------------------------------------------------------

    def settle(self, at: Side) -> None:
        """Carries the effects out on the model.

        Raises:
            AssertionError: a handle ended twice, or blocks hold something else than LANDED says.
        """
        while effects := at.transfers.take():
            for effect in effects:
                match at.desk.carry_out(effect, self.now):
                    case Tell(engine_id, End() as end):
                        self._told(at, (engine_id, end.handle), end, again=effect.again)  # type: ignore[union-attr]
                    case Post() as post:
                        assert post.op_id not in at.posts
                        at.posts[post.op_id] = post
                    case CancelOp(op_id):
                        at.cancelled.add(op_id)
                    case TearDown(op_ids):
                        at.torn.update(op_ids)
                    case Unmap(engine_id):
                        # Sessions from it are closed: its copies end.
                        at.torn.update(o for o, p in at.posts.items() if p.src.engine_id == engine_id)
                        assert not [p for p in at.posts.values() if p.dst.engine_id == engine_id]
                    case _:
                        pass
        at.transfers.check()

    def _told(self, at: Side, key: tuple[str, str], end: End, *, again: bool) -> None:
        if again:
            assert at.ends[key] == end
            return
        assert key not in at.ends, f"{key} ended twice: {at.ends[key]} and {end}"
        at.ends[key] = end
        busy = {b for p in at.posts.values() if p.dst.engine_id == key[0] for b in p.dst_blocks}
        self.ended(at, key, end, busy)

    def ended(self, at: Side, key: tuple[str, str], end: End, busy: set[int]) -> None:
        """A handle has ended; `busy`: blocks of its engine that a copy still writes. For the test to look at."""

    def link(self, side: int) -> LinkState | None:
        """Where a side's link is."""
        states = [link.state for link in self.sides[side].desk.links]
        assert len(states) <= 1, states
        return states[0] if states else None

    @staticmethod
    def good(end: End) -> bool:
        """Whether a consumer may use what it has."""
        return end.outcome is Outcome.LANDED
