"""Of splits that are equal at the load the one with the most goodput is chosen, and the goodputs are printed."""

from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import words
from pdserve.planner.planning.candidates import Budget, Candidate
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.goodputs import goodput
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Mode

RUN = 100
"""Requests of a run."""
SETTINGS = Settings(requests=RUN, binding=False, switches=False)
QUESTION = Question(load("mi300x"), Workload(Span(2000, 2000), Span(200, 200), rate=3.0), Slo(ttft=1.0, itl=0.05))
"""Four engines split in whatever way hold three requests a second; they differ in what they hold at most."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of four engines."""
    return decide(QUESTION, Budget(engines=4), SETTINGS)


def most(prefills: int) -> float:
    """The goodput of a split of four engines, requests a second."""
    found = goodput(QUESTION, Candidate(Mode.WRITE, prefills, 4 - prefills), 0, RUN).value
    assert found is not None
    return found.mean


def test_equal_splits_go_by_goodput(plan: Plan) -> None:
    """All three P:D meet every objective at the load. The one that holds the most requests is chosen, with as many runs
    as any choice has; by the room in the objectives alone another one would be."""
    everywhere = {prefills: most(prefills) for prefills in (1, 2, 3)}
    print(everywhere)
    assert plan.best.candidate.prefills == max(everywhere, key=lambda prefills: everywhere[prefills])
    assert len(plan.best.trials) == 6
    roomiest = decide(QUESTION, Budget(engines=4), replace(SETTINGS, goodput=False))
    assert roomiest.best.candidate.shape != plan.best.candidate.shape
    assert roomiest.best.attainment == pytest.approx(plan.best.attainment, abs=0.011)


def test_goodputs_of_the_best_few_are_printed(plan: Plan) -> None:
    """With its interval: that of the choice, of another P:D at least, and of the colocated engines; in words and in
    JSON."""
    ways = list(plan.goodputs)
    (line,) = (one.text for one in words.after(plan) if one.text.startswith("Goodput"))
    print(line)
    assert len({way.shape for way in ways if not way.colocated}) >= 2
    assert any(way.colocated for way in ways)
    assert plan.best.candidate in ways
    for way in ways:
        assert f"{way.label} " in line
    assert line.count(" req/s (") == len(ways)
    told = document(plan)["goodputs"]
    assert [one["label"] for one in told] == [way.label for way in ways]
    assert all(one["goodput"]["low"] <= one["goodput"]["mean"] <= one["goodput"]["high"] for one in told)


def test_quick_plan_says_by_what_it_chose(plan: Plan) -> None:
    """Without goodput equal splits go by the room that is left, and the plan says which rule it took."""
    assert "of splits the one with the most goodput" in words.how(plan)
    assert "of splits the one with the most room" in words.how(replace(plan, goodputs={}))
