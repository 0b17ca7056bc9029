"""The two tables of states."""

from itertools import product
from typing import TypeVar

import pytest

from pdserve.kvd.states import (
    CONSUMER_TABLE,
    PRODUCER_TABLE,
    Consumer,
    ConsumerEvent,
    IllegalTransition,
    Producer,
    ProducerEvent,
    step_consumer,
    step_producer,
)

_S = TypeVar("_S")


def test_every_state_but_the_last_can_reach_an_end() -> None:
    """No end can get stuck: from each state a terminal one is reachable, and those lead nowhere."""
    producers: dict[Producer, set[Producer]] = {}
    for (before, _), after in PRODUCER_TABLE.items():
        producers.setdefault(before, set()).add(after)
    assert _reaches(producers, {Producer.FREED}) == set(Producer)
    assert Producer.FREED not in producers
    consumers: dict[Consumer, set[Consumer]] = {}
    for (earlier, _), later in CONSUMER_TABLE.items():
        consumers.setdefault(earlier, set()).add(later)
    assert _reaches(consumers, {Consumer.LANDED, Consumer.FAILED}) == set(Consumer)
    assert not {Consumer.LANDED, Consumer.FAILED} & set(consumers)


def _reaches(steps: dict[_S, set[_S]], ends: set[_S]) -> set[_S]:
    found = set(ends)
    while grown := {s for s, after in steps.items() if after & found} - found:
        found |= grown
    return found


def test_blocks_are_freed_only_through_release_or_a_fence() -> None:
    """A producer's blocks come free from COMPLETE by a release, or from FENCING; never past a fence."""
    ways = {(before, event) for (before, event), after in PRODUCER_TABLE.items() if after is Producer.FREED}
    assert ways == {(Producer.COMPLETE, ProducerEvent.RELEASE), (Producer.FENCING, ProducerEvent.FREE)}
    failed = {before for (before, _), after in CONSUMER_TABLE.items() if after is Consumer.FAILED}
    assert failed == {Consumer.FENCING}


def test_a_step_that_the_table_lacks_is_refused() -> None:
    """Any pair outside the tables is a defect and raises."""
    for state, event in product(Producer, ProducerEvent):
        if (state, event) not in PRODUCER_TABLE:
            with pytest.raises(IllegalTransition):
                step_producer(state, event)
    for end, what in product(Consumer, ConsumerEvent):
        if (end, what) not in CONSUMER_TABLE:
            with pytest.raises(IllegalTransition):
                step_consumer(end, what)
