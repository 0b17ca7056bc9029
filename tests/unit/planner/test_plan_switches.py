"""What would change the answer: searched in a stated range, and never against the verdict."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning.axes import Axis, axes
from pdserve.planner.planning.candidates import Budget, Candidate, candidates
from pdserve.planner.planning.changes import changes
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.floors import floors
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.ranking import Ranked
from pdserve.planner.planning.rivals import Facts
from pdserve.planner.planning.screening import LOWER, Screened
from pdserve.planner.planning.switches import Searched, Switch, switches
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Mode

PAIR, TWO = Candidate(Mode.WRITE, 1, 1), Candidate(Mode.COLOCATED, engines=2)
SLO = Slo(ttft=1.0, itl=0.05)
SETTINGS = Settings(requests=100, goodput=False, binding=False)
VERDICT = replace(SETTINGS, switches=False)


def ask(rate: float, output: int = 200, slo: Slo = SLO) -> Question:
    """2000 tokens in."""
    return Question(load("mi300x"), Workload(Span(2000, 2000), Span(output, output), rate=rate), slo)


def planned(question: Question, settings: Settings = SETTINGS) -> Plan:
    """For two engines."""
    return decide(question, Budget(engines=2), settings)


def of(plan: Plan, what: str) -> list[Switch]:
    """Its changes of one figure."""
    assert plan.searched is not None
    return [one for one in plan.searched.switches if one.what == what]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`only(name, ...)`: plans move these figures alone: no time goes into those that a test does not look at."""

    def call(*names: str) -> None:
        monkeypatch.setattr(
            "pdserve.planner.planning.decision.axes", lambda *given: (one for one in axes(*given) if one.what in names)
        )

    return call


def every_axis(question: Question) -> dict[str, Axis]:
    """By what is moved."""
    alone = floors(question, candidates(question.profile, Budget(engines=2)))
    return {one.what: one for one in axes(question, alone.values())}


def test_range_goes_to_what_each_figure_means() -> None:
    """A rate down to requests that are alone, and far up; answers of one token to all that fits; any hit rate; an SLO
    down to what a lone request takes."""
    question = ask(4.0)
    found = every_axis(question)
    alone = floors(question, candidates(question.profile, Budget(engines=2)))
    assert found["rate"].low <= 0.05 / max(one.e2e for one in alone.values())
    assert found["rate"].high >= 1000 * 4.0
    assert (found["answer length"].low, found["answer length"].high) == (1, 16 * 200)
    assert (found["hit rate"].low, found["hit rate"].high) == (0.0, 1.0)
    assert found["TTFT SLO"].low == min(one.ttft for one in alone.values())
    short_context = replace(question.profile, max_model_len=2500)
    assert every_axis(replace(question, profile=short_context))["answer length"].high == 500


@pytest.mark.parametrize("name", ["rate", "answer length", "hit rate", "ITL SLO"])
def test_looks_reach_both_ends(name: str) -> None:
    """Every look is farther away than the one before, and the last is the end of the range."""
    axis = every_axis(ask(4.0))[name]
    up, down = list(axis.looks(up=True)), list(axis.looks(up=False))
    assert up == sorted(set(up))
    assert down == sorted(set(down), reverse=True)
    assert up[-1] == axis.high
    assert axis.low in (axis.now, *down)


def test_far_change_is_found(only: Callable[..., None]) -> None:
    """The rate at which colocated engines do as well is a tenth of the load; and the one at which nothing holds is
    found above it, though it is more than four times as much."""
    only("rate")
    low = of(planned(ask(4.0, output=1000)), "rate")[0]
    print(low)
    assert low.to == TWO
    assert low.other < 1.0
    (high,) = (one for one in of(planned(ask(1.0)), "rate") if one.to is None)
    print(high)
    assert high.other > 4 * high.now


def test_change_is_where_the_plan_changes(only: Callable[..., None]) -> None:
    """Asked again at either end of what it says, a plan gives the answer that it says there."""
    only("ITL SLO")
    plan = planned(ask(4.0))
    (switch,) = (one for one in of(plan, "ITL SLO") if one.other > one.now)
    again = {
        value: planned(ask(4.0, slo=replace(SLO, itl=value)), VERDICT)
        for value in (switch.still * 0.97, switch.other * 1.03)
    }
    print(switch, {value: one.best.candidate.label for value, one in again.items()})
    assert [one.best.candidate.colocated for one in again.values()] == [False, True]
    assert switch.other <= 1.1 * switch.still


def test_nothing_that_changes_it_has_its_range(only: Callable[..., None]) -> None:
    """Directions in which nothing changes the answer are named with how far was looked; where nothing at all does, that
    is said, with the ranges."""
    only("TTFT SLO", "ITL SLO")
    plan = planned(ask(4.0))
    assert plan.searched is not None
    text, items = changes(plan.searched, plan.best.candidate)
    print(text, *items, sep="\n")
    assert items[-1].startswith("nothing else within ")
    assert "TTFT SLO up to 64 s" in items[-1]
    assert document(plan)["unchanged"][-1]["high"] == 64.0
    text, items = changes(Searched((), plan.searched.quiet), plan.best.candidate)
    assert text.startswith("Nothing looked at changes the answer (1P:1D), one figure alone: ")
    assert "TTFT SLO up to 64 s" in text
    assert not items


def test_what_was_not_looked_for_is_null() -> None:
    """A plan that did not look says so in JSON, and not that nothing changes it."""
    plan = planned(ask(4.0), VERDICT)
    assert (document(plan)["switches"], document(plan)["unchanged"]) == (None, None)


@pytest.mark.parametrize(("rate", "said"), [(4.0, TWO), (0.1, PAIR)])
def test_verdict_is_not_contradicted_by_short_runs(rate: float, said: Candidate) -> None:
    """Whatever the verdict, right or wrong by short runs: no other way is said to be better right beside the given
    figures. Here colocated engines are the verdict where they hold nothing, and a split where both hold everything."""
    question = ask(rate)
    beside = [near_by(axis) for axis in every_axis(question).values()]
    found = switches(question, Facts(said), [TWO, PAIR], beside, 0, 100)
    print(*found.switches, sep="\n")
    assert [one for one in found.switches if one.to is not None and one.still == one.now] == []


def near_by(axis: Axis) -> Axis:
    """With the first look in each direction alone: a change right beside the given figure is found by it, or not."""
    ends = [next(axis.looks(up=up), axis.now) for up in (False, True)]
    return replace(axis, low=ends[0], high=ends[1])


def test_goodput_that_is_too_high_to_be_found_is_not_contradicted(
    only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says that 90 % are good at 200 req/s still: then it does not say that from 10 on not half are."""
    only("rate")
    found = [one for one in of(planned(ask(4.0)), "rate") if one.to is None]
    assert found[0].other < 200.0, "by its runs alone it would say so"

    def ranked(screened: Screened, requests: int | None) -> Ranked:
        high = Goodput(None, "90% and more are good at 200 req/s still", math.inf, 200.0)
        return Ranked(screened, {screened.best.candidate: high})

    monkeypatch.setattr("pdserve.planner.planning.decision.rank", ranked)
    plan = planned(ask(4.0), replace(SETTINGS, goodput=True))
    print(*of(plan, "rate"), sep="\n")
    assert [one for one in of(plan, "rate") if one.to is None and one.other <= 200.0] == []


def test_load_that_was_too_much_is_too_much(only: Callable[..., None]) -> None:
    """A plan that goes down from 20 to what is held says the same below: nothing holds at the load above the planned
    one, however well short runs do there. And up to its goodput there is no load at which nothing holds."""
    only("rate")
    plan = decide(ask(20.0), Budget(engines=2), Settings(binding=False))
    planned_rate = plan.question.workload.rate or 0.0
    assert planned_rate < 20.0
    (switch,) = (one for one in of(plan, "rate") if one.to is None)
    print(switch, plan.goodput)
    assert switch.still < planned_rate / LOWER
    assert plan.goodput is not None
    assert switch.other >= plan.goodput.mean
