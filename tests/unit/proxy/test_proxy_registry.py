"""The registry's rules: who is listed, who is routable, who is evicted and when."""

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.proxy.registry import MAX_FOREIGN, Change, Entry, Joined, Left, Registry
from pdserve.rpc.errors import InvalidRequest, Overloaded
from pdserve.runtime.beats import LIFETIME, Beat, Foreign


def beat(engine_id: str = "e1", number: int = 1, **changes: Any) -> Beat:
    """A beat of a healthy prefill engine."""
    fields: dict[str, Any] = {
        "type": "P",
        "http_address": "h:1",
        "zmq_address": "",
        "dp_size": 1,
        "tp_size": 1,
        "transfer_mode": "READ",
        "engine_id": engine_id,
        "grpc_address": f"{engine_id}:1",
        "locator": b"l",
        "model": "m",
        "tokenizer": "bytes",
        "role": "prefill",
        "identity": {"b": "2", "a": "1"},
        "max_model_len": 100,
        "block_size": 16,
        "total_kv_tokens": 1600,
        "free_kv_tokens": 1600,
        "running": 0,
        "waiting": 0,
        "steps": 0,
        "state": "ready",
        "beat": number,
        "sent_at": 0.0,
    }
    return Beat(**(fields | changes))


def up(registry: Registry, engine_id: str = "e1", **changes: Any) -> Entry:
    """A routable engine."""
    registry.beat(beat(engine_id, **changes), 0.0)
    registry.channel_ready(engine_id)
    entry = registry.get(engine_id)
    assert entry is not None
    return entry


def test_an_engine_is_routable_once_it_is_connected() -> None:
    """A registered engine is listed at once, and routed to only when its channel is up."""
    registry = Registry()
    changes = registry.beat(beat(), 0.0)
    assert [type(change) for change in changes] == [Joined]
    assert registry.routable("m") == []
    assert "no gRPC connection" in registry.entries()[0].excluded_because()
    registry.channel_ready("e1")
    assert [entry.card.engine_id for entry in registry.routable("m")] == ["e1"]
    assert registry.routable("other") == []
    assert registry.entries()[0].card.identity == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize(("age", "evicted"), [(3.4, False), (3.5, True)])
def test_three_missed_beats_evict(age: float, evicted: bool) -> None:
    """Half an interval of grace after the third missed beat, and not before."""
    registry = Registry(interval=1.0, missed=3)
    up(registry)
    changes = registry.expire(age)
    assert [change.engine_id for change in changes if isinstance(change, Left)] == (["e1"] if evicted else [])
    assert bool(registry.entries()) is not evicted


def test_an_evicted_engine_may_come_back() -> None:
    """Missed beats may be the network's fault: the next beat joins anew."""
    registry = Registry()
    up(registry)
    registry.expire(10.0)
    assert isinstance(registry.beat(beat(number=12), 12.0)[0], Joined)


def test_a_standing_step_counter_counts_as_missed_while_work_waits() -> None:
    """Three beats with work waiting and no step: the legs are cut, and it stays listed with the reason."""
    registry = Registry(stalled=3)
    entry = up(registry, waiting=1, steps=5)
    changes: list[Change] = []
    for number in (2, 3, 4):
        assert not entry.stuck
        assert registry.missed(entry, number - 1.0) == number - 2
        changes = registry.beat(beat(number=number, waiting=1, steps=5), number - 1.0)
    assert [change.engine_id for change in changes if isinstance(change, Left)] == ["e1"]
    assert registry.routable("m") == []
    assert "stands still for 3 beats" in entry.excluded_because()

    changes = registry.beat(beat(number=5, waiting=1, steps=6), 4.0)
    assert isinstance(changes[0], Joined)
    assert not entry.routable, "it must be dialled again first"
    registry.channel_ready("e1")
    assert entry.routable


def test_a_long_step_is_no_silence() -> None:
    """While beats come, a standing counter evicts only after `stalled` of them, however few may be missed."""
    registry = Registry(missed=3, stalled=30)
    entry = up(registry, waiting=1)
    for number in range(2, 30):
        assert registry.beat(beat(number=number, waiting=1), float(number)) == []
        assert registry.expire(number + 0.9) == []
    assert entry.routable


def test_an_idle_engine_may_stand_still() -> None:
    """No work waits: the step counter says nothing."""
    registry = Registry(stalled=1)
    entry = up(registry)
    for number in range(2, 9):
        assert registry.beat(beat(number=number), float(number)) == []
    assert entry.routable


def test_a_restart_on_the_same_address_replaces_at_once() -> None:
    """Two processes cannot serve one address; late beats of the old one do not revive it."""
    registry = Registry()
    up(registry)
    changes = registry.beat(beat("e2", grpc_address="e1:1"), 0.1)
    assert isinstance(changes[0], Left)
    assert isinstance(changes[1], Joined)
    assert (changes[0].engine_id, changes[0].graceful) == ("e1", False)
    assert "restarted as e2" in changes[0].reason
    with pytest.raises(InvalidRequest, match="has ended"):
        registry.beat(beat("e1", 2), 0.2)


def test_bye_is_remembered_until_its_beats_have_lost_their_tags() -> None:
    """A bye removes gracefully; a replayed beat is refused as long as its tag is good."""
    registry = Registry()
    up(registry)
    (change,) = registry.beat(beat(number=2, state="bye"), 1.0)
    assert isinstance(change, Left)
    assert change.graceful
    with pytest.raises(InvalidRequest, match="has ended"):
        registry.beat(beat(number=3), 2.0)
    registry.expire(1.0 + LIFETIME)
    assert isinstance(registry.beat(beat(number=4), 32.0)[0], Joined)


def test_draining_is_listed_and_not_routed() -> None:
    """What drains keeps its legs and gets no new one; it may change its mind."""
    registry = Registry()
    entry = up(registry)
    version = registry.version
    assert registry.beat(beat(number=2, state="draining"), 1.0) == []
    assert registry.routable("m") == []
    assert entry.excluded_because() == "it is draining"
    assert registry.version > version
    registry.beat(beat(number=3), 2.0)
    assert entry.routable


def test_a_broken_channel_evicts_at_once() -> None:
    """No beat has to be missed."""
    registry = Registry()
    up(registry)
    (change,) = registry.channel_broken("e1", "IDLE")
    assert isinstance(change, Left)
    assert not change.graceful
    assert registry.channel_broken("e1", "IDLE") == []


def test_old_beats_and_clones_are_refused() -> None:
    """A replay, and a second engine under one id."""
    registry = Registry()
    up(registry, number=5)
    with pytest.raises(InvalidRequest, match="beat 5 of e1 after beat 5"):
        registry.beat(beat(number=5), 1.0)
    with pytest.raises(InvalidRequest, match="is registered at e1:1"):
        registry.beat(beat(number=6, grpc_address="other:1"), 1.0)


def test_foreign_instances_are_listed_bounded_and_forgotten() -> None:
    """A stock instance proves nothing: it is listed, in bounded number, until it falls silent."""
    registry = Registry()
    for number in range(MAX_FOREIGN):
        registry.foreign(Foreign(type="P", http_address=f"h:{number}"), 0.0)
    registry.foreign(Foreign(type="P", http_address="h:0"), 5.0)
    with pytest.raises(Overloaded):
        registry.foreign(Foreign(type="P", http_address="one more"), 5.0)
    registry.expire(11.0)
    assert [stranger.instance.http_address for stranger in registry.strangers()] == ["h:0"]
    assert registry.models() == []


class RegistryMachine(RuleBasedStateMachine):
    """Random lives of three engines at two addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.now = 0.0
        self.number = 0
        self.joined: set[str] = set()

    def apply(self, changes: list[Change]) -> None:
        """Checks that joins and leaves alternate."""
        for change in changes:
            if isinstance(change, Joined):
                assert change.card.engine_id not in self.joined
                self.joined.add(change.card.engine_id)
            else:
                self.joined.remove(change.engine_id)

    @rule(
        engine=st.sampled_from("abc"),
        address=st.sampled_from("xy"),
        state=st.sampled_from(["ready", "ready", "draining", "bye"]),
        waiting=st.integers(0, 1),
        step=st.integers(0, 1),
    )
    def beats(self, engine: str, address: str, state: str, waiting: int, step: int) -> None:
        """Any engine beats anything."""
        self.number += 1
        known = self.registry.get(engine)
        steps = (known.steps if known else 0) + step
        message = beat(engine, self.number, grpc_address=address, state=state, waiting=waiting, steps=steps)
        with contextlib.suppress(InvalidRequest):
            self.apply(self.registry.beat(message, self.now))

    @rule(engine=st.sampled_from("abc"))
    def connects(self, engine: str) -> None:
        """A dialled engine's channel comes up."""
        if engine in self.joined:
            self.registry.channel_ready(engine)

    @rule(engine=st.sampled_from("abc"))
    def breaks(self, engine: str) -> None:
        """A channel breaks."""
        if engine in self.joined:
            self.apply(self.registry.channel_broken(engine, "x"))

    @rule(seconds=st.floats(0.0, 40.0))
    def waits(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.apply(self.registry.expire(self.now))

    @invariant()
    def consistent(self) -> None:
        """Who is joined is listed and not stuck; one engine an address; routable means connected and heard."""
        entries = self.registry.entries()
        assert {entry.card.engine_id for entry in entries if not entry.stuck} == self.joined
        assert len({entry.card.address for entry in entries}) == len(entries)
        for entry in self.registry.routable("m"):
            assert entry.card.engine_id in self.joined
            assert entry.excluded_because() == ""


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
