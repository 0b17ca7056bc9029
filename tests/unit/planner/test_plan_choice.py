"""`pdserve plan` chooses what exhaustive simulation finds, and its interval holds another seed's result."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import trial
from pdserve.planner.planning.candidates import Budget, Candidate, candidates
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import Profile
from pdserve.planner.profile_file import load

SEED = 7
WORKLOADS = 50
REQUESTS = 40
"""Of a run: few, so that 50 workloads are simulated exhaustively in seconds."""
FRESH = 3
"""Runs of every way with seeds that no plan has seen."""
QUICK = Settings(requests=REQUESTS, goodput=False, binding=False, switches=False)


def drawn(rng: random.Random, profile: Profile) -> tuple[Question, Budget]:
    """Two to four engines; prompts of 500 to 12,000 tokens, answers of 20 to 1500, any hit rate, low load and high."""
    prompt, output = int(2 ** rng.uniform(9, 13.5)), int(2 ** rng.uniform(4.3, 10.5))
    workload = Workload(
        Span(prompt, prompt), Span(output, output), rng.choice((0.0, 0.0, 0.4, 0.8)), rate=2 ** rng.uniform(0, 6)
    )
    slo = Slo(ttft=rng.choice((1.0, 2.0, 5.0)), itl=rng.choice((0.04, 0.06, 0.1)))
    return Question(profile, workload, slo), Budget(engines=rng.randint(2, 4))


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Of 50 seeded random workloads."""
    rng, profile = random.Random(SEED), load("mi300x")
    print(f"seed {SEED}")
    return [decide(question, budget, QUICK) for question, budget in (drawn(rng, profile) for _ in range(WORKLOADS))]


def fresh(plan: Plan, way: Candidate, runs: int = FRESH) -> list[trial.Trial]:
    """Runs of a way at the planned load with seeds that the plan has not seen."""
    of = plan.screened
    return [trial.run(plan.question, way, of.count, 1000 + seed) for seed in range(runs)]


def test_choice_is_near_the_best_of_all(plans: list[Plan]) -> None:
    """For each of 50 workloads the choice's score, over runs that the plan has not seen, is within 5 % of the best
    score that any way has over the same runs."""
    worst = 0.0
    for plan in plans:
        budget = plan.budget
        scores = {
            way: fmean(run.score for run in fresh(plan, way)) for way in candidates(plan.question.profile, budget)
        }
        top = max(scores.values())
        lost = 1 - scores[plan.best.candidate] / top if top else 0.0
        worst = max(worst, lost)
        assert lost <= 0.05, (
            plan.best.candidate.label,
            {way.label: score for way, score in scores.items()},
            plan.asked,
        )
    print(f"worst choice: {worst:.1%} below the best")


def held(plans: list[Plan]) -> int:
    """Plans in whose interval the attainment of a run lies that they have not seen."""
    return sum(plan.attainment.holds(fresh(plan, plan.best.candidate, 1)[0].attainment) for plan in plans)


def test_interval_holds_another_seed(plans: list[Plan]) -> None:
    """The attainment of one more run, with a seed that the plan has not seen, lies in its interval for at least 45 of
    the 50 workloads."""
    print(f"{held(plans)} of {len(plans)} held")
    assert held(plans) >= 0.9 * len(plans)


def test_interval_holds_where_it_is_hard() -> None:
    """So it does for workloads that are too heavy and are planned for where half is good and more: of 32 drawn, those
    whose attainment is clearly between nothing and all; and the intervals are no mere 0 to 100 %."""
    rng, profile = random.Random(SEED), load("mi300x")
    found = []
    for _ in range(32):
        question, budget = drawn(rng, profile)
        heavy = question.workload.at(2 ** rng.uniform(5, 9))
        found.append(decide(replace(question, workload=heavy), budget, QUICK))
    hard = [plan for plan in found if plan.attainment.mean < 0.97]
    widths = sorted(plan.attainment.high - plan.attainment.low for plan in hard)
    print(f"{held(hard)} of {len(hard)} held; median width {widths[len(widths) // 2]:.1%}")
    assert len(hard) >= 12
    assert held(hard) >= 0.9 * len(hard)
    assert widths[len(widths) // 2] < 0.6


def test_workloads_are_not_all_alike(plans: list[Plan]) -> None:
    """Among the 50 some are to be split and some not, with different P:D: the choice is one."""
    shapes = {plan.best.candidate.shape for plan in plans}
    print(sorted(shapes))
    assert any(plan.best.candidate.colocated for plan in plans)
    assert len(shapes) >= 5


def test_same_seed_same_plan() -> None:
    """Planning draws nothing that the seed does not determine."""
    question, budget = drawn(random.Random(SEED), load("mi300x"))
    settings = replace(QUICK, seed=3)
    assert decide(question, budget, settings) == decide(question, budget, settings)


def test_screening_is_cheap() -> None:
    """Of eight engines, 15 ways, most are run once: 15 runs, and at most 5 x 2 + 2 x 3 + 2 more."""
    question, _ = drawn(random.Random(SEED), load("mi300x"))
    plan = decide(question, Budget(engines=8), QUICK)
    assert len(plan.screened.all) == 15
    assert plan.screened.runs <= 15 + 2 * 6 + 2 * 3
    assert len(plan.best.trials) == 6
