"""The core under any order of events, against a model of engines that reuse blocks the moment they may.

The model engine takes blocks from its pool, fills them, and takes them back as soon as kvd says so
(an end, or `fenced`), overwriting them at once. So a copy that runs too late, an attempt that is not
fenced, a block that is freed under an operation and a byte that never came all show as wrong contents.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode


def _one_in(n: int) -> st.SearchStrategy[bool]:
    """True about once in n times."""
    return st.integers(1, n).map(lambda i: i == n)


RANKS, LAYERS, BLOCKS, PROMPT = 2, 2, 12, 3
LIMITS = Limits(lease=6, accept=4, transfer=5, fence=1, park=5, tie=2, max_remembered=10_000)


@dataclass(eq=False)
class Engine:
    """A pool of blocks, and who has which."""

    engine_id: str
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    held: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Slot:
    """A transfer that the proxy has minted: who is to play which part."""

    tid: bytes
    mode: Mode
    source: Engine
    targets: list[Engine]
    """Of each consumer."""
    produced: bool = False
    consumed: int = 0
    muddled: bool = False
    """Somebody who has no part in it has spoken: it may end by a deadline only."""


@dataclass
class Producer:
    """One prompt that an engine computes."""

    engine: Engine
    handle: str
    tid: bytes
    mode: Mode
    consumers: int
    attempt: int = 0
    known: int = 0
    fencing: bool = False
    offered: bool = False


@dataclass
class Consumer:
    """One prompt that an engine takes over."""

    engine: Engine
    handle: str
    tid: bytes
    first: int
    blocks: tuple[int, ...]


class Machine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = CoreDriver(LIMITS)
        self.engines: list[Engine] = []
        self.slots: list[Slot] = []
        self.producers: dict[str, Producer] = {}
        self.consumers: dict[str, Consumer] = {}
        self.said: set[tuple[str, str]] = set()
        """Handles that are owed an end."""
        self.seen: set[tuple[str, str]] = set()
        self.fences_seen = 0
        self.names = 0
        self.steps = 0
        for _ in range(3):
            self._start_engine()

    def _start_engine(self) -> None:
        self.names += 1
        engine = Engine(f"E{self.names}")
        self.driver.engine(engine.engine_id, ranks=RANKS, layers=LAYERS, blocks=BLOCKS)
        self.engines.append(engine)

    def _name(self) -> str:
        self.names += 1
        return f"h{self.names}"

    # -- engines ----------------------------------------------------------------------------

    @rule(
        mode=st.sampled_from([Mode.WRITE, Mode.WRITE, Mode.READ]),
        parts=st.lists(st.integers(0, 2), min_size=2, max_size=3),
    )
    def mint(self, mode: Mode, parts: list[int]) -> None:
        """The proxy chooses a producer and its consumers."""
        self._mint(mode, parts)

    @initialize(n=st.integers(1, 2), mode=st.sampled_from([Mode.WRITE, Mode.WRITE, Mode.READ]))
    def first(self, n: int, mode: Mode) -> None:
        """There is always something to begin with."""
        self._mint(mode, [0, 1, 2][: 1 + n])
        self._mint(Mode.WRITE, [0, 1])

    def _mint(self, mode: Mode, parts: list[int]) -> None:
        if len(self.slots) < 4:
            self.names += 1
            chosen = [self.engines[i] for i in parts]
            self.slots.append(Slot(self.names.to_bytes(16, "big"), mode, chosen[0], chosen[1:]))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), wrong=_one_in(12))
    def begin(self, data: st.DataObject, wrong: bool) -> None:
        """A producer begins; now and then a second one, of any engine and mode."""
        slot = data.draw(st.sampled_from(self.slots))
        if wrong:
            slot.muddled = True
            self._begin(slot, data.draw(st.sampled_from(self.engines)), data.draw(st.sampled_from(Mode)))
        elif not slot.produced:
            self._begin(slot, slot.source, slot.mode)

    def _begin(self, slot: Slot, engine: Engine, mode: Mode) -> None:
        if len(engine.free) < PROMPT:
            return
        slot.produced = True
        made = Producer(engine, self._name(), slot.tid, mode, len(slot.targets))
        self._take(engine, made.handle, PROMPT)
        self.producers[made.handle] = made
        self.said.add((engine.engine_id, made.handle))
        self.driver.begin(engine.engine_id, made.handle, made.tid, mode, made.consumers)
        self._settle()

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), blocks=st.integers(1, 2), lost=st.sampled_from(["nothing", "begin", "layer", "rank", "late"]))
    def chunk(self, data: st.DataObject, blocks: int, lost: str) -> None:
        """A step fills blocks and tells of them, or some of the notices are lost, or come an attempt too late."""
        self._chunk(data.draw(st.sampled_from(list(self.producers.values()))), blocks, lost)

    def _chunk(self, made: Producer, blocks: int, lost: str) -> None:
        if made.fencing or made.offered or made.known == PROMPT:
            return
        if lost == "late":
            self.steps += 1
            stale = Chunk(made.handle, made.attempt - 1, 0, tuple(made.engine.held[made.handle]), PROMPT)
            if made.attempt:
                self.driver.step(made.engine.engine_id, self.steps, stale)
            return
        low, high = made.known, min(PROMPT, made.known + blocks)
        made.known = high
        self._fill(made, low, high)
        self.steps += 1
        ids = tuple(made.engine.held[made.handle][low : high + 1])  # one more than is complete
        chunk = Chunk(made.handle, made.attempt, low, ids, high)
        if lost == "begin":
            return
        for rank in range(1 if lost == "rank" else RANKS):
            layers = (0,) if lost == "layer" else tuple(range(LAYERS))
            end = lost != "layer"
            self.driver.step(made.engine.engine_id, self.steps, chunk, rank=rank, layers=layers, end=end)
        self._settle()

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        """A producer has computed all of its prompt."""
        self._offer(data.draw(st.sampled_from(list(self.producers.values()))))

    def _offer(self, made: Producer) -> None:
        if made.fencing or made.offered:
            return
        self._fill(made, made.known, PROMPT)
        made.known, made.offered = PROMPT, True
        ids = tuple(made.engine.held[made.handle])
        self.driver.offer(
            made.engine.engine_id,
            made.handle,
            made.tid,
            ids,
            mode=made.mode,
            attempt=made.attempt,
            consumers=made.consumers,
        )
        self._settle()

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A producer loses its blocks; they may be overwritten once kvd has fenced the attempt."""
        made = data.draw(st.sampled_from(list(self.producers.values())))
        if made.fencing or made.offered:
            return
        made.fencing = True
        self.driver.retract(made.engine.engine_id, made.handle, made.attempt, final=False)
        self._settle()

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), happens=_one_in(6))
    def abort(self, data: st.DataObject, happens: bool) -> None:
        """A producer gives up."""
        if not happens:
            return
        made = data.draw(st.sampled_from(list(self.producers.values())))
        self.driver.retract(made.engine.engine_id, made.handle, made.attempt, final=True)
        self._settle()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), first=st.sampled_from([0, 0, 1, 2, PROMPT]), wrong=_one_in(12))
    def accept(self, data: st.DataObject, first: int, wrong: bool) -> None:
        """The next consumer accepts; now and then one of any engine, source, index or mode."""
        slot = data.draw(st.sampled_from(self.slots))
        if wrong:
            slot.muddled = True
            engine, source = data.draw(st.sampled_from(self.engines)), data.draw(st.sampled_from(self.engines))
            self._accept(slot, engine, source, data.draw(st.sampled_from(Mode)), data.draw(st.integers(0, 2)), first)
        elif slot.consumed < len(slot.targets):
            self._accept_next(slot, first)

    def _accept_next(self, slot: Slot, first: int) -> None:
        target = slot.targets[slot.consumed]
        if len(target.free) >= PROMPT - first:
            slot.consumed += 1
            self._accept(slot, target, slot.source, slot.mode, slot.consumed - 1, first)

    def _accept(self, slot: Slot, engine: Engine, source: Engine, mode: Mode, index: int, first: int) -> None:
        if len(engine.free) < PROMPT - first:
            return
        handle = self._name()
        blocks = tuple(self._take(engine, handle, PROMPT - first))
        self.consumers[handle] = Consumer(engine, handle, slot.tid, first, blocks)
        self.said.add((engine.engine_id, handle))
        self.driver.accept(
            engine.engine_id, handle, slot.tid, blocks, source.engine_id, mode=mode, consumer=index, first=first
        )
        self._settle()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), moves=st.integers(1, 8), first=st.sampled_from([0, 0, 1, 2]), eager=st.booleans())
    def go_on(self, data: st.DataObject, moves: int, first: int, eager: bool) -> None:
        """A transfer goes its ordinary way for a while, so that the others strike late in it too."""
        slot = data.draw(st.sampled_from(self.slots))
        for _ in range(moves):
            while eager and self.driver.posts:  # copies are fast, or else slower than computing
                self._finish(min(self.driver.posts), "")
            self._go_on(slot, first)

    def _go_on(self, slot: Slot, first: int) -> None:
        made = next((p for p in self.producers.values() if p.tid == slot.tid), None)
        if not slot.produced:
            self._begin(slot, slot.source, slot.mode)
        elif slot.consumed < len(slot.targets):
            self._accept_next(slot, first)
        elif made is not None and not made.fencing and made.known < PROMPT and slot.mode is Mode.WRITE:
            self._chunk(made, 1, "nothing")
        elif made is not None and not made.fencing and not made.offered:
            self._offer(made)
        elif self.driver.posts:
            self._finish(min(self.driver.posts), "")

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """The proxy is done with a transfer whose parts have all been played."""
        slot = data.draw(st.sampled_from(self.slots))
        if slot.produced and slot.consumed == len(slot.targets):
            self.slots.remove(slot)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), happens=_one_in(6))
    def give_up(self, data: st.DataObject, happens: bool) -> None:
        """One consumer gives itself up."""
        if not happens:
            return
        made = data.draw(st.sampled_from(list(self.consumers.values())))
        self.driver.retract(made.engine.engine_id, made.handle, 0, final=True)
        self._settle()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), happens=_one_in(6))
    def cancel(self, data: st.DataObject, happens: bool) -> None:
        """Somebody gives a transfer up, perhaps before kvd has heard of it."""
        if happens:
            self.driver.cancel(data.draw(st.sampled_from(self.slots)).tid)
            self._settle()

    @precondition(lambda self: self.slots)
    @rule()
    def renew(self) -> None:
        """The hosts keep the leases alive."""
        for engine in self.engines:
            self.driver.core.renew(engine.engine_id, [slot.tid for slot in self.slots], self.driver.now)

    @rule(at=st.integers(0, 2), dead=st.booleans(), happens=_one_in(12))
    def lose(self, at: int, dead: bool, happens: bool) -> None:
        """An engine is not heard any more, or is dead and another takes its place."""
        if not happens:
            return
        if not dead:
            self.driver.core.engine_lost(self.engines[at].engine_id, "silent", self.driver.now)
            self.driver.take()
            self._settle()
            return
        engine = self.engines[at]
        for slot in self.slots:  # a dead engine plays no part any more, which the others cannot know
            slot.muddled |= engine in slot.targets[slot.consumed :] or (engine is slot.source and not slot.produced)
        self.driver.die(engine.engine_id)
        self._settle()
        self.engines[at] = self.engines[-1]
        self.engines.pop()
        self._start_engine()

    # -- below ------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.posts)
    @rule(data=st.data(), fails=_one_in(12))
    def copy_ends(self, data: st.DataObject, fails: bool) -> None:
        """Any copy in flight ends, in any order, well or badly."""
        self._finish(data.draw(st.sampled_from(sorted(self.driver.posts))), "it failed" if fails else "")

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.01, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines come due; a session that is torn down ends its copies."""
        self.driver.advance(seconds)
        self._settle()
        for op_id in sorted(self.driver.torn & set(self.driver.posts)):
            self._finish(op_id, "torn down")

    def _finish(self, op_id: int, error: str) -> None:
        post = self.driver.posts[op_id]
        for key, blocks in ((post.src, post.src_blocks), (post.dst, post.dst_blocks)):
            owner = next((e for e in self.engines if e.engine_id == key.engine_id), None)
            if owner is not None:
                free = set(owner.free) & set(blocks)
                assert not free, f"blocks {free} of {key} were given back under operation {op_id}"
        self.driver.finish(op_id, error)
        self._settle()

    # -- the model --------------------------------------------------------------------------

    def _take(self, engine: Engine, handle: str, count: int) -> list[int]:
        taken = [engine.free.pop(0) for _ in range(count)]
        engine.held[handle] = taken
        return taken

    def _give_back(self, engine: Engine, handle: str) -> None:
        blocks = engine.held.pop(handle, [])
        self._overwrite(engine, blocks)
        engine.free.extend(blocks)

    def _overwrite(self, engine: Engine, blocks: list[int]) -> None:
        for rank in range(RANKS):
            for layer in range(LAYERS):
                for block in blocks:
                    self.driver.contents[engine.engine_id, rank, layer, block] = "overwritten"

    def _fill(self, made: Producer, low: int, high: int) -> None:
        blocks = made.engine.held[made.handle]
        for rank in range(RANKS):
            for layer in range(LAYERS):
                for i in range(low, high):
                    place = (made.engine.engine_id, rank, layer, blocks[i])
                    self.driver.contents[place] = (made.tid, rank, layer, i)

    def _settle(self) -> None:
        """Engines hear what kvd has said."""
        for engine_id, fenced in self.driver.fenced[self.fences_seen :]:
            made = self.producers.get(fenced.handle)
            if made is not None and made.engine.engine_id == engine_id and made.fencing:
                flying = [
                    p for p in self.driver.posts.values() if set(p.src_blocks) & set(made.engine.held[made.handle])
                ]
                assert not [p for p in flying if p.src.engine_id == engine_id], "fenced with a copy in flight"
                self._give_back(made.engine, made.handle)
                self._take(made.engine, made.handle, PROMPT)
                made.attempt, made.known, made.fencing = made.attempt + 1, 0, False
        self.fences_seen = len(self.driver.fenced)
        for key in list(self.driver.ends.keys() - self.seen):
            self.seen.add(key)
            end = self.driver.ends[key]
            consumer = self.consumers.pop(key[1], None)
            if consumer is not None:
                if end.outcome is Outcome.LANDED:
                    self._verify(consumer)
                self._give_back(consumer.engine, consumer.handle)
            producer = self.producers.pop(key[1], None)
            if producer is not None:
                assert end.outcome is not Outcome.RELEASED or producer.offered
                self._give_back(producer.engine, producer.handle)

    def _verify(self, consumer: Consumer) -> None:
        for rank in range(RANKS):
            for layer in range(LAYERS):
                for i, block in enumerate(consumer.blocks):
                    got = self.driver.contents.get((consumer.engine.engine_id, rank, layer, block))
                    assert got == (consumer.tid, rank, layer, consumer.first + i), f"{consumer}: {got}"

    @invariant()
    def nobody_is_told_twice_or_unasked(self) -> None:
        """Ends go to handles that were said, once (the driver fails on a second); the books add up."""
        assert set(self.driver.ends) <= self.said
        self.driver.core.check()

    @invariant()
    def kvd_and_the_engines_agree(self) -> None:
        """A block that the engine has free is under no lease."""
        for engine in self.engines:
            for lease in self.driver.leases:
                if lease.engine_id == engine.engine_id:
                    assert not set(lease.block_ids) & set(engine.free), lease

    def teardown(self) -> None:
        """What has been said and copied ends without a deadline; after every deadline nothing is left."""
        for slot in self.slots:
            for _ in range(200):
                self._go_on(slot, 0)
            if slot.produced and slot.consumed == len(slot.targets) and not slot.muddled:
                stuck = [h for h, p in self.producers.items() if p.tid == slot.tid]
                stuck += [h for h, c in self.consumers.items() if c.tid == slot.tid]
                assert not stuck, f"all was said and copied, and still waits: {stuck} of {slot}"
        for _ in range(8):
            for op_id in sorted(self.driver.posts):
                self._finish(op_id, "cancelled")
            self.driver.advance(10)
            self._settle()
        assert set(self.driver.ends) == self.said
        book = self.driver.core.book
        assert [len(book.transfers), len(book.handles), len(book.ops), len(book.timers), book.parked] == [0] * 5
        assert not book.by_engine
        assert len(self.driver.leases) == 0
        for engine in self.engines:
            assert sorted(engine.free) == list(range(BLOCKS))
            assert self.driver.leases.counts(engine.engine_id, BLOCKS).free == BLOCKS
        super().teardown()


TestTransfersMachine = Machine.TestCase
TestTransfersMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
