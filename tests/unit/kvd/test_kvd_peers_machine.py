"""Two cores and their link under any order of events, against engines that reuse blocks the moment they may.

The model's copies read what is in the source when they end, so that a late read of blocks that were given back reads
something else. LANDED with wrong contents, a block given back under a copy, a second end, or anything that is still
held when all is quiet shows.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvd.client.messages import Accept, Begin, Cancel, End, Offer, Retract
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk
from pdserve.kvd.peers.links import LinkLimits
from pdserve.kvd.types import Mode
from tests.unit.kvd.peers_driver import BLOCKS, LAYERS, Side, TwoCores

LIMITS = Limits(lease=20, accept=8, transfer=9, fence=1, park=8, tie=4, max_remembered=10_000)
LINKS = LinkLimits(connect=3.0, grace=2.0, backoff_first=0.5, backoff_most=1.0)
PROMPT = 3


@dataclass(eq=False)
class Engine:
    """A pool of blocks, and who has which."""

    engine_id: str
    side: int
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    held: dict[str, list[int]] = field(default_factory=dict)


@dataclass(eq=False)
class Slot:
    """A transfer: what has been said of it."""

    tid: bytes
    mode: Mode
    source: Engine
    target: Engine
    produced: str = ""
    consumed: str = ""
    offered: bool = False
    known: int = 0


class Model(TwoCores):
    """Engines that overwrite what they get back."""

    def __init__(self) -> None:
        super().__init__(LIMITS, LINKS)
        self.engines: dict[str, Engine] = {}
        self.prompts: dict[str, tuple[bytes, int]] = {}
        """Consumer's handle -> its transfer, and the first block that it wants."""
        self.landed = 0

    def ended(self, at: Side, key: tuple[str, str], end: End, busy: set[int]) -> None:
        """Looks at what was landed, and takes the blocks back."""
        engine = self.engines.get(key[0])
        if engine is None or engine.side != at.index:
            return  # the other's engine, whose daemon is lost: nobody hears it here
        blocks = engine.held.pop(key[1])
        assert not set(blocks) & busy, f"{key} got blocks back that a copy still writes"
        if self.good(end):
            self.landed += 1
            tid, first = self.prompts[key[1]]
            for layer in range(LAYERS):
                for i, block in enumerate(blocks):
                    assert self.contents[key[0], layer, block] == (tid, first + i, layer)
        for block in blocks:
            for layer in range(LAYERS):
                self.contents[key[0], layer, block] = "something else"
        engine.free += blocks


class Machine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.names = 0
        self.steps = 0
        self.slots: list[Slot] = []
        self.said: set[tuple[int, str, str]] = set()
        self.parts: list[list[Engine]] = [[], []]
        for side in (0, 1):
            self._start(side)

    def _name(self, what: str) -> str:
        self.names += 1
        return f"{what}{self.names}"

    def _start(self, side: int) -> None:
        engine = Engine(self._name("PD"[side]), side)
        self.model.engines[engine.engine_id] = engine
        self.model.engine(side, engine.engine_id)
        self.parts[side] = [engine]

    def _take(self, engine: Engine, handle: str, count: int) -> tuple[int, ...]:
        taken = [engine.free.pop(0) for _ in range(count)]
        engine.held[handle] = taken
        return tuple(taken)

    @initialize(modes=st.lists(st.sampled_from(Mode), min_size=1, max_size=3))
    def first(self, modes: list[Mode]) -> None:
        """There is something to begin with."""
        for mode in modes:
            self.mint(mode)

    @rule(mode=st.sampled_from(Mode))
    def mint(self, mode: Mode) -> None:
        """The proxy chooses a producer and a consumer."""
        if len(self.slots) < 3:
            self.names += 1
            self.slots.append(Slot(self.names.to_bytes(16, "big"), mode, self.parts[0][0], self.parts[1][0]))

    # -- what engines do --------------------------------------------------------------------

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A producer begins."""
        self._begin(data.draw(st.sampled_from(self.slots)))

    def _begin(self, slot: Slot) -> None:
        engine = slot.source
        if slot.produced or engine not in self.parts[0] or len(engine.free) < PROMPT:
            return
        slot.produced = self._name("p")
        self._take(engine, slot.produced, PROMPT)
        self.said.add((0, engine.engine_id, slot.produced))
        self.model.say(0, engine.engine_id, Begin(slot.produced, slot.tid, slot.mode))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A step computes a block and tells of it."""
        self._compute(data.draw(st.sampled_from(self.slots)))

    def _fill(self, slot: Slot, low: int, high: int) -> None:
        for i in range(low, high):
            for layer in range(LAYERS):
                block = slot.source.held[slot.produced][i]
                self.model.contents[slot.source.engine_id, layer, block] = (slot.tid, i, layer)

    def _compute(self, slot: Slot) -> None:
        if slot.produced not in slot.source.held or slot.offered or slot.known == PROMPT:
            return
        self._fill(slot, slot.known, slot.known + 1)
        low, slot.known = slot.known, slot.known + 1
        self.steps += 1
        ids = tuple(slot.source.held[slot.produced][low : slot.known])
        self.model.step(slot.source.engine_id, self.steps, Chunk(slot.produced, 0, low, ids, slot.known))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        """A producer has computed all."""
        self._offer(data.draw(st.sampled_from(self.slots)))

    def _offer(self, slot: Slot) -> None:
        if slot.produced not in slot.source.held or slot.offered:
            return
        self._fill(slot, slot.known, PROMPT)
        slot.known, slot.offered = PROMPT, True
        ids = tuple(slot.source.held[slot.produced])
        self.model.say(0, slot.source.engine_id, Offer(slot.produced, slot.tid, 0, ids, 40, slot.mode))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), first=st.sampled_from([0, 0, 1, PROMPT]))
    def accept(self, data: st.DataObject, first: int) -> None:
        """A consumer accepts."""
        self._accept(data.draw(st.sampled_from(self.slots)), first)

    def _accept(self, slot: Slot, first: int) -> None:
        engine = slot.target
        if slot.consumed or engine not in self.parts[1] or len(engine.free) < PROMPT:
            return
        slot.consumed = self._name("d")
        blocks = self._take(engine, slot.consumed, PROMPT - first)
        self.model.prompts[slot.consumed] = (slot.tid, first)
        self.said.add((1, engine.engine_id, slot.consumed))
        self._say_accept(slot, blocks, first)

    def _say_accept(self, slot: Slot, blocks: tuple[int, ...], first: int) -> None:
        ticket = f"{slot.source.engine_id}|{slot.mode.value}".encode()
        message = Accept(slot.consumed, slot.tid, 0, blocks, first, ticket=ticket)
        self.model.say(1, slot.target.engine_id, message)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def accept_again(self, data: st.DataObject) -> None:
        """A consumer says again what it has said."""
        slot = data.draw(st.sampled_from(self.slots))
        if slot.consumed in slot.target.held and slot.target in self.parts[1]:
            first = self.model.prompts[slot.consumed][1]
            self._say_accept(slot, tuple(slot.target.held[slot.consumed]), first)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), moves=st.integers(1, 12))
    def go_on(self, data: st.DataObject, moves: int) -> None:
        """A transfer goes its ordinary way for a while, so that the others strike late in it too."""
        slot = data.draw(st.sampled_from(self.slots))
        for _ in range(moves):
            if not slot.consumed:
                self._accept(slot, 0)
            elif not slot.produced:
                self._begin(slot)
            elif slot.known < PROMPT and slot.mode is Mode.WRITE:
                self._compute(slot)
            elif not slot.offered:
                self._offer(slot)
            self.connect(True, True)
            self.model.deliver_all()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), who=st.sampled_from(["producer", "consumer", "cancel here", "cancel there", "nobody"]))
    def give_up(self, data: st.DataObject, who: str) -> None:
        """Somebody gives a transfer up."""
        slot = data.draw(st.sampled_from(self.slots))
        if who == "producer" and slot.produced:
            self.model.say(0, slot.source.engine_id, Retract(slot.produced, 0, True, "CANCELLED"))
        elif who == "consumer" and slot.consumed:
            self.model.say(1, slot.target.engine_id, Retract(slot.consumed, 0, True, "CANCELLED"))
        elif who.startswith("cancel"):
            self.model.say(0 if who == "cancel there" else 1, "", Cancel(slot.tid, "CANCELLED"))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """The proxy is done with a transfer that both have spoken of."""
        slot = data.draw(st.sampled_from(self.slots))
        if slot.produced and slot.consumed:
            self.slots.remove(slot)

    @rule(side=st.integers(0, 1), happens=st.integers(1, 8))
    def die(self, side: int, happens: int) -> None:
        """An engine dies, and another takes its place."""
        if happens == 1:
            engine = self.parts[side][0]
            del self.model.engines[engine.engine_id]  # nobody looks at its blocks any more
            self.model.die(side, engine.engine_id)
            self._start(side)

    # -- copies, streams, time --------------------------------------------------------------

    @precondition(lambda self: any(side.posts for side in self.model.sides))
    @rule(data=st.data(), fails=st.integers(1, 10))
    def copy_ends(self, data: st.DataObject, fails: int) -> None:
        """Any copy in flight ends, well or badly."""
        (side, op_id) = data.draw(st.sampled_from([(s.index, o) for s in self.model.sides for o in sorted(s.posts)]))
        self.model.finish(side, op_id, "it failed" if fails == 1 else "")

    @rule(greeted=st.booleans(), welcomed=st.booleans())
    def connect(self, greeted: bool, welcomed: bool) -> None:
        """Calls that are due begin, and one of them is answered, or breaks."""
        self.model.call()
        if self.model.dialing:
            self.model.answer(0, greeted=greeted, welcomed=welcomed)

    @precondition(lambda self: len(self.model.dialing) > 1)
    @rule()
    def the_later_call_first(self) -> None:
        """Both have called at once."""
        self.model.answer(1)

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data(), frames=st.integers(1, 4), side=st.integers(0, 1))
    def arrive(self, data: st.DataObject, frames: int, side: int) -> None:
        """Some frames arrive, on one side."""
        self.model.carry()
        if not self.model.streams:
            return
        stream = data.draw(st.sampled_from(self.model.streams))
        for _ in range(min(frames, len(stream.frames[side]))):
            self.model.deliver(stream, side)

    @rule()
    def arrive_all(self) -> None:
        """Everything arrives."""
        self.model.deliver_all()

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data(), arrived=st.integers(0, 3))
    def cut(self, data: st.DataObject, arrived: int) -> None:
        """A stream breaks; some of what was under way has arrived."""
        self.model.cut(data.draw(st.sampled_from(self.model.streams)), arrived)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.6, 1.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines come due; sessions that are torn down end their copies."""
        self.model.advance(seconds)
        self._end_torn()

    def _end_torn(self) -> None:
        for side in self.model.sides:
            for op_id in sorted(side.torn & set(side.posts)):
                self.model.finish(side.index, op_id, "torn down")

    @invariant()
    def one_link(self) -> None:
        """A pair of daemons never has two."""
        assert [self.model.link(side) for side in (0, 1)]

    def teardown(self) -> None:
        """When all is quiet, everything has ended once and nothing is held."""
        for _ in range(40):
            self.model.call()
            while self.model.dialing:
                self.model.answer(0)
            self.model.deliver_all()
            for side in self.model.sides:
                for op_id in sorted(side.posts):
                    self.model.finish(side.index, op_id, "it is late")
            self.model.advance(1.0)
            self._end_torn()
        for index, engine, handle in self.said:
            if engine in self.model.engines:
                assert (engine, handle) in self.model.sides[index].ends, f"{engine}/{handle} never ended"
        for side in self.model.sides:
            assert not side.transfers.open
            assert not side.transfers.book.ops
            assert not side.posts
            assert not len(side.transfers.book.leases)
            side.transfers.relay.check()
        for found in self.model.engines.values():
            assert sorted(found.free) == list(range(BLOCKS))


TestPeersMachine = Machine.TestCase
TestPeersMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
