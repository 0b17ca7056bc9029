"""What holds in every simulation: nothing is lost, memory is kept, time goes forward, seeds repeat."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.simulator import Engine, EngineSpec, Mode
from tests.unit.planner.random_fleets import random_case

seeds = st.integers(0, 10**9)


@settings(max_examples=80, deadline=None)
@given(seed=seeds, faults=st.booleans())
def test_no_request_is_lost(seed: int, faults: bool) -> None:
    """Every request gets all its tokens, no more and no fewer, whatever befalls the engines."""
    case = random_case(seed, faults=faults)
    outcome = case.run()
    assert outcome.unfinished == ()
    assert [one.index for one in outcome] == list(range(len(case.jobs)))
    assert [one.tokens for one in outcome] == [job.output for job in case.jobs]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, faults=st.booleans())
def test_memory_is_never_above_capacity_and_is_empty_in_the_end(seed: int, faults: bool) -> None:
    """After every run of every engine what is held adds up and fits; at the end nothing is held."""
    case = random_case(seed, faults=faults)
    engines: list[Engine] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = Engine.begin

        def checked(self: Engine, index: int, now: float) -> object:
            self.check()
            if self not in engines:
                engines.append(self)
            accepted = begin(self, index, now)
            self.check()
            return accepted

        patch.setattr(Engine, "begin", checked)
        outcome = case.run()
    assert engines
    assert all(engine.used == 0 for engine in engines)
    most = max(spec.kv_tokens for spec in (case.fleet.prefill, case.fleet.decode, case.fleet.both))
    assert all(spent.kv_high <= most for spent in outcome.engines)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, faults=st.booleans())
def test_time_goes_forward(seed: int, faults: bool) -> None:
    """A request is sent when it is due or later, its tokens ascend, and its parts fit into its TTFT."""
    case = random_case(seed, faults=faults)
    outcome = case.run()
    for one in outcome:
        times = outcome.times(one.index)
        assert one.sent >= case.arrivals[one.index]
        assert times[0] > one.sent
        assert np.all(np.diff(times) >= 0)
        assert one.prefilled >= 0
        assert one.handed_over >= 0
        if one.attempts == 1 and not sum(engine.preemptions for engine in outcome.engines):
            assert one.prefilled <= one.ttft + 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_the_same_seed_gives_the_same(seed: int) -> None:
    """Two runs of one case are equal; nothing is drawn and no order is left to chance."""
    first, second = random_case(seed, faults=True).run(), random_case(seed, faults=True).run()
    assert first.served == second.served
    assert first.engines == second.engines


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_a_closed_loop_keeps_its_bound(seed: int) -> None:
    """Never more than the bound in flight, and requests are sent in order."""
    case = random_case(seed, mode=Mode.READ)
    bound = case.concurrency or 1
    outcome = case.__class__(case.fleet, case.jobs, case.arrivals, bound, []).run()
    changes = [(one.sent, 1) for one in outcome] + [(float(outcome.times(one.index)[-1]), -1) for one in outcome]
    in_flight = 0
    for _, change in sorted(changes):
        in_flight += change
        assert in_flight <= bound
    sent = [one.sent for one in outcome]
    assert sent == sorted(sent)


def test_a_bound_that_is_violated_is_noticed() -> None:
    """The check of the memory's books is not blind."""
    case = random_case(3)
    engine = Engine(case.fleet.roles[0], EngineSpec(), jump=True)
    engine.used = 1
    with pytest.raises(RuntimeError, match="add up"):
        engine.check()
