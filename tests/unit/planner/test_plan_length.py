"""Runs are long enough: what a plan says is held is held by a run that is longer, with a seed the plan has not seen."""

from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import trial, words
from pdserve.planner.planning.candidates import Budget, Candidate
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.goodputs import goodput
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Mode

SCREEN = Settings(goodput=False, binding=False, switches=False)
LONG, UNSEEN = 4000, 4321
"""Requests and seed of an independent run."""
SLO = Slo(ttft=1.0, itl=0.05)


def ask(rate: float, prompt: int = 2000, output: int = 1000, slo: Slo = SLO) -> Question:
    """Of the published deployment: an answer takes 24 s alone, and twice as long where an ITL of 50 ms is just met."""
    return Question(load("mi300x"), Workload(Span(prompt, prompt), Span(output, output), rate=rate), slo)


def independent(question: Question, way: Candidate) -> float:
    """Attainment of a long run that no plan has seen."""
    print(f"seed {UNSEEN}")
    return trial.run(question, way, LONG, UNSEEN).attainment


@pytest.mark.parametrize("rate", [3.3, 4.2], ids=["just held", "just too much"])
def test_what_is_planned_as_held_is_held(rate: float) -> None:
    """A pair holds 3.3 req/s and no 4.2: a plan for either says of its load what an independent run of 4000 requests
    comes to, and for the second goes down to a load that is held. Its runs are long enough, which it need not tell."""
    plan = decide(ask(rate), Budget(engines=2), SCREEN)
    found = independent(plan.question, plan.best.candidate)
    print(plan.best.candidate.label, plan.question.workload.rate, plan.attainment, found)
    assert found == pytest.approx(plan.attainment.mean, abs=0.1)
    assert found >= 0.5
    assert "flatters" not in words.how(plan)
    assert (plan.asked == plan.question.workload) is (rate == 3.3)
    if rate != 3.3:
        assert independent(ask(rate), plan.best.candidate) < 0.5


@pytest.mark.parametrize(
    ("question", "way"),
    [
        (ask(4.0), Candidate(Mode.WRITE, 1, 1)),
        (ask(4.0, 2000, 20, Slo(ttft=1.0)), Candidate(Mode.WRITE, 1, 1)),
    ],
    ids=["ITL of long answers", "TTFT of a growing queue"],
)
def test_goodput_is_between_held_and_not_held(question: Question, way: Candidate) -> None:
    """An independent run of 4000 requests holds 90 % a little below the goodput, and does not a little above it."""
    value = goodput(question, way, 0, None).value
    assert value is not None
    below, above = (
        independent(replace(question, workload=question.workload.at(factor * value.mean)), way) for factor in (0.9, 1.1)
    )
    print(value, below, above)
    assert above < 0.9 <= below


def test_run_of_given_length_says_that_it_flatters() -> None:
    """Runs of 100 requests are made where they are asked for, as the published curves have them; the plan then says
    that at a load that lasts fewer requests are good."""
    short = decide(ask(4.0), Budget(engines=2), replace(SCREEN, requests=100))
    assert {one.requests for one in short.screened.all} == {100}
    assert "such a run flatters" in words.how(short)
