"""The plan gives the answers that were published: which ratio, and when not to split."""

from dataclasses import replace

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.fit import RATIO_SLO
from pdserve.planner.planning import words
from pdserve.planner.planning.candidates import Budget, Kind, candidates
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.floors import floors
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile_file import load
from pdserve.planner.published import load_published
from pdserve.planner.simulator import Mode

QUICK = Settings(requests=250, goodput=False, binding=False, switches=False)
TOO_MUCH = 8.0
"""Requests a second that no three or four engines hold: the plan goes down to what the best way holds."""
ROWS = load_published().ratios


def ask(prompt: int, output: int, rate: float, hits: float = 0.0) -> Workload:
    """Requests of one size."""
    return Workload(Span(prompt, prompt), Span(output, output), hits, rate=rate)


@pytest.mark.parametrize("place", [2, 3], ids=["1P:2D at 80 % hits", "1P:1D to 1P:2D at 45 % hits"])
def test_best_ratio_is_the_published_one(place: int) -> None:
    """Rows 3 and 4 of the published ratios, with a profile that was fitted on rows 1 and 2 alone."""
    row = ROWS[place]
    for engines in row.engines:
        question = Question(load("mi325x"), ask(row.isl, row.osl, TOO_MUCH, row.hit_rate), RATIO_SLO)
        best = decide(question, Budget(engines=engines), QUICK).best.candidate
        print(row, engines, best.label)
        assert (best.prefills, best.decodes) in row.best


def ttft_bound() -> Plan:
    """TTFT within 300 ms, and the shortest prompt for which a split takes 330 ms with nothing else to do."""
    profile = load("mi300x")
    for prompt in range(500, 8000, 50):
        question = Question(profile, ask(prompt, 200, 1.0), Slo(ttft=0.3, itl=0.2))
        alone = floors(question, candidates(profile, Budget(engines=2)))
        if min(alone[Kind(Mode.READ)].ttft, alone[Kind(Mode.WRITE)].ttft) >= 0.33:
            print(f"{prompt} tokens: {alone}")
            return decide(question, Budget(engines=2), QUICK)
    raise AssertionError("no such prompt")


def test_ttft_bound_slo_stays_colocated() -> None:
    """A TTFT SLO of 300 ms with a split baseline of 330 ms: stay colocated, because no load makes a split faster."""
    plan = ttft_bound()
    assert plan.best.candidate.colocated
    assert set(plan.impossible) == {Kind(Mode.READ), Kind(Mode.WRITE)}
    said = words.report(plan)
    print(said)
    assert "-> Do not split: 2 colocated." in said
    assert "A split in READ is out: a TTFT SLO of 300 ms is below the 33" in said
    assert "of a request that is alone" in said


def test_published_run_prefers_write() -> None:
    """2000 in, 1000 out at 8 req/s, runs of 100 requests as published: split, WRITE, and 2.2 times the attainment of
    two colocated engines at least."""
    question = Question(load("mi300x"), ask(2000, 1000, 8.0), Slo(ttft=1.0, itl=0.05))
    plan = decide(question, Budget(gpus=8), replace(QUICK, requests=100))
    assert plan.best.candidate.label == "1P:1D WRITE"
    assert plan.asked == plan.question.workload
    assert plan.opponent is not None
    assert plan.opponent.candidate.label == "2 colocated"
    assert plan.best.attainment >= 2.2 * plan.opponent.attainment


def test_low_load_is_not_split() -> None:
    """At a hundredth of that load both do; the plan says not to split, because there is nothing to gain."""
    question = Question(load("mi300x"), ask(2000, 1000, 0.08), Slo(ttft=1.0, itl=0.15))
    said = words.report(decide(question, Budget(engines=2), QUICK))
    print(said)
    assert "-> Do not split: 2 colocated." in said
    assert "At this load colocated engines do as well as the best split" in said


def test_short_answers_are_not_split() -> None:
    """Where answers have a few tokens there is little decoding that prompts could disturb."""
    question = Question(load("mi300x"), ask(2000, 16, 6.0), Slo(ttft=1.0, itl=0.3))
    said = words.report(decide(question, Budget(engines=4), QUICK))
    print(said)
    assert "-> Do not split: 4 colocated." in said
    assert "Answers are short" in said
