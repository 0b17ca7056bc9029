"""Jumping and stepping are one model: the results are the same to the last bit."""

from dataclasses import replace

import numpy as np
import pytest

from pdserve.planner.simulator import Mode, Outcome
from tests.unit.planner.random_fleets import random_case

SEEDS = range(60)


def assert_same(jumped: Outcome, stepped: Outcome, requests: int) -> None:
    """Every token of every request at the same time, and the same totals."""
    assert jumped.unfinished == stepped.unfinished
    assert jumped.served == stepped.served
    assert jumped.moved == stepped.moved
    for index in range(requests):
        assert np.array_equal(jumped.times(index), stepped.times(index))
    for a, b in zip(jumped.engines, stepped.engines, strict=True):
        assert replace(a, prefill=0.0, decode=0.0, mixed=0.0) == replace(b, prefill=0.0, decode=0.0, mixed=0.0)
        # Seconds are summed by run or by step, so their last bits differ.
        for name in ("prefill", "decode", "mixed"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_jumps_and_steps_give_the_same(mode: Mode) -> None:
    """Random fleets and workloads, tight memory, open and closed loop, in each mode."""
    preempted = 0
    for seed in SEEDS:
        print(f"seed {seed}")
        case = random_case(seed, mode=mode)
        jumped, stepped = case.run(), case.run(jump=False)
        assert_same(jumped, stepped, len(case.jobs))
        preempted += sum(engine.preemptions for engine in jumped.engines)
    assert preempted > 0, "the cases were meant to preempt"


def test_jumps_and_steps_give_the_same_through_faults() -> None:
    """Also when engines die, return and change roles."""
    retried = 0
    for seed in SEEDS:
        print(f"seed {seed}")
        case = random_case(seed, faults=True)
        jumped, stepped = case.run(), case.run(jump=False)
        assert_same(jumped, stepped, len(case.jobs))
        retried += sum(one.attempts > 1 for one in jumped)
    assert retried > 0, "the cases were meant to fail"


def test_a_run_of_equal_steps_is_one_event() -> None:
    """The same tokens with far fewer events: the point of jumping."""
    case = random_case(1, mode=Mode.WRITE, tight=False)
    events: dict[bool, int] = {}
    for jump in (True, False):
        outcome = case.run(jump=jump)
        events[jump] = outcome.events
    print(events)
    assert events[True] < events[False] / 2
