"""Goodput: its interval holds what a bisection cannot tell, and where there is none the plan says so."""

from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import words
from pdserve.planner.planning.candidates import Budget, Candidate
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.goodputs import PRECISION, Goodput, goodput
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Mode

PAIR = Candidate(Mode.WRITE, 1, 1)


def ask(rate: float, slo: Slo, output: int = 100) -> Question:
    """500 tokens in."""
    return Question(load("mi300x"), Workload(Span(500, 500), Span(output, output), rate=rate), slo)


def test_interval_holds_the_tolerance_of_the_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all seeds end in one bracket, the interval is as wide as the bracket at least: the goodput lies anywhere in
    it."""
    monkeypatch.setattr("pdserve.planner.planning.goodputs._one", lambda *_: 5.0)
    value = goodput(ask(4.0, Slo(ttft=1.0)), PAIR, 0, 100).value
    assert value is not None
    print(value)
    assert value.mean == 5.0
    assert value.high - value.low >= PRECISION * value.mean


@pytest.mark.parametrize(
    ("slo", "why", "held"),
    [
        (Slo(ttft=30.0), "90% and more are good at 0.64 req/s still", 0.64),
        (Slo(itl=0.0241), "not even at 0.0000195 req/s", 0.0),
    ],
    ids=["too high", "none"],
)
def test_goodput_that_is_not_found_says_why(monkeypatch: pytest.MonkeyPatch, slo: Slo, why: str, held: float) -> None:
    """A rate above 128 times the given one, or none down to 1/256 of it: there is no number, a reason, and the rate up
    to which it holds."""
    if "not even" in why:
        # Nothing meets it: the trial's verdict, not the simulator, is what this is about.
        monkeypatch.setattr("pdserve.planner.planning.goodputs.THRESHOLD", 1.01)
    found = goodput(ask(0.005, slo), PAIR, 0, 100)
    assert found.value is None
    assert why in found.why
    assert found.held == pytest.approx(held)


def test_plan_says_that_goodput_was_not_found() -> None:
    """In its words and in its document, by name; a plan that did not look for it says nothing."""
    plan = decide(ask(0.005, Slo(ttft=30.0)), Budget(engines=2), Settings(requests=20, binding=False, switches=False))
    said = words.report(plan)
    print(said)
    assert "Goodput (90% attainment): 2 colocated not found, 90% and more are good at 0.64 req/s still" in said
    assert document(plan)["goodput"] is None
    assert document(plan)["goodput_not_found"].startswith("90% and more")
    assert "Goodput" not in words.report(replace(plan, goodputs={}))
    assert "not found, why" in words.report(replace(plan, goodputs={plan.best.candidate: Goodput(None, "why")}))
