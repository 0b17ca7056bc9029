"""Leases in any order, against a model that counts every block anew after every step.

The model knows of each lease only what it was given: whose blocks, until when, what works on them,
and whether a fence keeps them. From that it says which blocks are free, and what may be released.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvd.leases import BlockCounts, IntegrityError, Lease, Leases

BLOCKS, TTL = 10, 3.0
ENGINES = ("P", "D")
IDS = st.lists(st.integers(0, BLOCKS - 1), max_size=4)


def _one_in(n: int) -> st.SearchStrategy[bool]:
    """True about once in n times."""
    return st.integers(1, n).map(lambda i: i == n)


@dataclass(eq=False)
class Held:
    """What the model knows of one lease."""

    lease: Lease
    engine: str
    writable: bool
    blocks: list[int]
    expires_at: float | None
    ops: set[int] = field(default_factory=set)
    barred: bool = False
    """In quarantine."""


class Machine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.now = 0.0
        self.held: list[Held] = []
        self.ended: list[Lease] = []
        self.ops: dict[int, tuple[Held, Held]] = {}
        self.next_op = 1

    # -- taking -----------------------------------------------------------------------------

    @initialize(prefix=st.integers(1, 3))
    def first(self, prefix: int) -> None:
        """Two readers of one prefix and a consumer: what is rare in random order is there from the start."""
        self.grant("P", [*range(prefix), 4], writable=False, forever=False)
        self.grant("P", [*range(prefix), 5], writable=False, forever=False)
        self.grant("D", [0, 1], writable=True, forever=True)

    @rule(engine=st.sampled_from(ENGINES), blocks=IDS, writable=st.booleans(), forever=st.booleans())
    def grant(self, engine: str, blocks: list[int], writable: bool, forever: bool) -> None:
        """Blocks are taken where the model sees no conflict, and the product agrees on whether there is one."""
        conflict = self._conflict(engine, blocks, writable)
        assert bool(self.leases.conflict(engine, blocks, writable=writable)) is conflict
        if not conflict:
            ttl = None if forever else TTL
            lease = self.leases.grant(engine, bytes(16), blocks, writable=writable, now=self.now, ttl=ttl)
            self.held.append(Held(lease, engine, writable, list(blocks), None if forever else self.now + TTL))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), blocks=IDS)
    def extend(self, data: st.DataObject, blocks: list[int]) -> None:
        """A lease gets more blocks, as a producer does chunk by chunk."""
        held = self._draw(data)
        if not held.barred and not self._conflict(held.engine, blocks, held.writable):
            self.leases.extend(held.lease, blocks)
            held.blocks += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1, max_size=4), behind=st.booleans())
    def share(self, data: st.DataObject, blocks: set[int], behind: bool) -> None:
        """One more reader of blocks that another lease has, behind some of its own."""
        held = self._draw(data)
        wanted = ([*sorted(blocks)] if behind else []) + held.blocks
        self.grant(held.engine, wanted, writable=False, forever=False)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """Time for a lease that has an end and no fence; nothing for the others."""
        held = self._draw(data)
        self.leases.renew(held.lease, self.now, TTL)
        if held.expires_at is not None and not held.barred:
            held.expires_at = self.now + TTL

    # -- copies -----------------------------------------------------------------------------

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3))
    def post(self, data: st.DataObject, count: int) -> None:
        """Operations read one lease's blocks and write another's; never those that a fence keeps."""
        sources = [h for h in self.held if not h.barred and not h.writable and h.blocks]
        targets = [h for h in self.held if not h.barred and h.writable and h.blocks]
        for _ in range(count if sources and targets else 0):
            pair = data.draw(st.sampled_from(sources)), data.draw(st.sampled_from(targets))
            for held in pair:
                held.lease.in_flight += 1
                held.ops.add(self.next_op)
            self.ops[self.next_op] = pair
            self.next_op += 1

    @precondition(lambda self: self.ops)
    @rule(data=st.data())
    def op_ends(self, data: st.DataObject) -> None:
        """In any order."""
        op = data.draw(st.sampled_from(sorted(self.ops)))
        for held in self.ops.pop(op):
            held.lease.in_flight -= 1
            held.ops.discard(op)
            if held.barred and not held.ops:
                self._release(held)

    # -- giving back ------------------------------------------------------------------------

    @precondition(lambda self: self.held)
    @rule(data=st.data(), idle=_one_in(4))
    def quarantine(self, data: st.DataObject, idle: bool) -> None:
        """Its transfer is stopped: free at once, or when its last operation has ended."""
        held = self._draw(data)
        if held.ops or idle:
            self._fence(held)

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 1.0, TTL]))
    def time_passes(self, seconds: float) -> None:
        """What was not renewed is fenced, then freed."""
        self.now += seconds
        due = [h for h in self.held if h.lease.expires_at is not None and h.lease.expires_at <= self.now]
        assert due == [h for h in self.held if h.expires_at is not None and h.expires_at <= self.now]
        for held in due:
            self._fence(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), idle=_one_in(4))
    def release(self, data: st.DataObject, idle: bool) -> None:
        """Blocks come back, but never under an operation: then nothing at all changes."""
        held = self._draw(data)
        if not held.ops:
            if idle:
                self._release(held)
            return
        before = self.leases.counts(held.engine, BLOCKS)
        with pytest.raises(IntegrityError, match="under"):
            self.leases.release(held.lease)
        assert self.leases.counts(held.engine, BLOCKS) == before

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), blocks=IDS)
    def touch_an_ended_one(self, data: st.DataObject, blocks: list[int]) -> None:
        """A lease that is over gives nothing back again, takes nothing, and is given no time."""
        lease = data.draw(st.sampled_from(self.ended))
        expires_at = lease.expires_at
        self.leases.release(lease)
        self.leases.renew(lease, self.now, TTL)
        assert lease.expires_at == expires_at
        with pytest.raises(IntegrityError, match="was released"):
            self.leases.extend(lease, blocks)

    @rule(engine=st.sampled_from(ENGINES))
    def forget(self, engine: str) -> None:
        """An ended engine's books are dropped where they are empty; else that is a defect, and nothing is dropped."""
        if not any(h.engine == engine for h in self.held):
            self.leases.forget_engine(engine)
            return
        with pytest.raises(IntegrityError, match="forgotten"):
            self.leases.forget_engine(engine)

    def _fence(self, held: Held) -> None:
        if not held.barred:
            held.barred, held.lease.quarantined_at = True, self.now
            if not held.ops:
                self._release(held)

    def _release(self, held: Held) -> None:
        self.leases.release(held.lease)
        self.held.remove(held)
        self.ended.append(held.lease)

    def _draw(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.held))

    # -- the model --------------------------------------------------------------------------

    def _conflict(self, engine: str, blocks: list[int], writable: bool) -> bool:
        others = [h for h in self.held if h.engine == engine]
        taken = {b for h in others if writable or h.writable for b in h.blocks}
        return bool(taken & set(blocks)) or (writable and len(set(blocks)) < len(blocks))

    @invariant()
    def blocks_add_up(self) -> None:
        """Each block counts once, under its gravest state, as the model finds it block by block."""
        for engine in ENGINES:
            counted = {"free": 0, "leased": 0, "in_flight": 0, "quarantined": 0}
            for block in range(BLOCKS):
                holders = [h for h in self.held if h.engine == engine and block in h.blocks]
                if any(h.barred for h in holders):
                    counted["quarantined"] += 1
                elif any(h.ops for h in holders):
                    counted["in_flight"] += 1
                else:
                    counted["leased" if holders else "free"] += 1
            assert self.leases.counts(engine, BLOCKS) == BlockCounts(**counted)
            self.leases.check(engine, BLOCKS)
            assert self.leases.held_by(engine) == sum(h.engine == engine for h in self.held)

    @invariant()
    def nothing_is_freed_in_flight(self) -> None:
        """What an operation works on is under a lease that is not over, and cannot be taken to be written."""
        for pair in self.ops.values():
            for held in pair:
                assert not held.lease.released
                assert held.lease in list(self.leases)
                assert self.leases.conflict(held.engine, held.blocks, writable=True)

    def teardown(self) -> None:
        """When every operation has ended and every lease is released, all is free."""
        for held in list(self.held):
            self._fence(held)
        for op in sorted(self.ops):
            for held in self.ops.pop(op):
                held.lease.in_flight -= 1
                held.ops.discard(op)
                if not held.ops and held in self.held:
                    self._release(held)
        assert len(self.leases) == 0
        for engine in ENGINES:
            assert self.leases.counts(engine, BLOCKS).free == BLOCKS
            self.leases.forget_engine(engine)
        super().teardown()


TestLeasesMachine = Machine.TestCase
TestLeasesMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
