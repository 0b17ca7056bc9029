"""A number of accelerators as few wide engines, as more narrow ones, or split: one plan weighs all of them."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.cli.__main__ import main
from pdserve.planner.planning import words
from pdserve.planner.planning.candidates import Budget, Candidate, candidates
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.floors import floors
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import Profile, with_costs
from pdserve.planner.profile_file import load
from pdserve.planner.published import load_published
from pdserve.planner.simulator import Mode
from pdserve.rpc.errors import ConfigError

PROFILE = replace(load("mi300x"), siblings=(load("mi300x-tp8"),))
QUICK = Settings(requests=100, goodput=False, binding=False, switches=False)
NAMES = {
    "standard_1xTP8": "1 colocated (mi300x-tp8)",
    "standard_2xTP4": "2 colocated (mi300x)",
    "read_1P1D": "1P:1D READ (mi300x)",
    "write_1P1D": "1P:1D WRITE (mi300x)",
}
"""Published configurations, and what a plan calls them."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of eight accelerators, for the published load: 2000 in, 1000 out, 8 req/s, runs of 100."""
    question = Question(PROFILE, Workload(Span(2000, 2000), Span(1000, 1000), rate=8.0), Slo(ttft=1.0, itl=0.05))
    return decide(question, Budget(gpus=8), QUICK)


def test_plan_agrees_with_the_four_published_curves(plan: Plan) -> None:
    """At 8 req/s its run with the published arrivals has, of each configuration, the published number of good requests
    to within 4 of 100; so has the table of rates to within 5; and WRITE or READ is chosen over both colocated ways."""
    published = load_published()
    ours = {one.candidate.label: one.trials[0].attainment for one in plan.screened.all}
    assert set(ours) == set(NAMES.values())
    for name, label in NAMES.items():
        print(label, ours[label], published.rate8[name].met_both, published.attainment[8.0][name])
        assert 100 * ours[label] == pytest.approx(published.rate8[name].met_both, abs=4)
        assert 100 * ours[label] == pytest.approx(published.attainment[8.0][name], abs=5)
    assert plan.best.candidate.shape == "1P:1D (mi300x)"


def test_each_way_says_whose_engines_it_has(plan: Plan) -> None:
    """In words and in JSON. Alone a profile is not named with its ways."""
    said = words.report(plan)
    assert "8 accelerators (profiles mi300x and mi300x-tp8): " in said
    assert "-> Split 1P:1D (mi300x), " in said
    found = json.loads(json.dumps(document(plan)))
    assert found["profiles"] == ["mi300x", "mi300x-tp8"]
    assert {way["profile"] for way in found["ways"]} == {"mi300x", "mi300x-tp8"}
    assert {one.profile for one in candidates(load("mi300x"), Budget(gpus=8))} == {""}


def test_each_size_has_as_many_engines_as_fit() -> None:
    """Of four accelerators there is no wide engine; of sixteen there are two, or four narrow ones."""
    assert [one.label for one in candidates(PROFILE, Budget(gpus=4))] == ["1 colocated (mi300x)"]
    assert [one.label for one in candidates(PROFILE, Budget(gpus=16)) if one.colocated] == [
        "4 colocated (mi300x)",
        "2 colocated (mi300x-tp8)",
    ]


def wide(layers: int = 94) -> Profile:
    """Beside `mi300x` such engines of eight accelerators: prompts take half as long, a decode step two thirds, and the
    hand-over is the slower one by half."""
    narrow = load("mi300x")
    roles: dict[str, Any] = {}
    for name, role in narrow.roles.items():
        costs = {
            cost: value * (0.66 if cost.startswith("decode") else 0.5) for cost, value in asdict(role.spec.cost).items()
        }
        roles[name] = replace(with_costs(role, **costs), accelerators=8)
    handover = replace(narrow.handover, tail=1.5 * narrow.handover.tail, layers=layers)
    return replace(narrow, siblings=(replace(narrow, name="wide", handover=handover, **roles),))


def test_a_split_may_have_two_sizes() -> None:
    """Of sixteen accelerators one wide engine and two narrow ones make a pair, each way round; the wide ones alone two,
    the narrow ones alone four. Engines of another model make none."""
    found = [one.label for one in candidates(wide(), Budget(gpus=16)) if one.mode is Mode.READ]
    assert found == [
        "1P:3D READ (mi300x)",
        "2P:2D READ (mi300x)",
        "3P:1D READ (mi300x)",
        "1P:1D READ (wide)",
        "2P:1D READ (mi300x to wide)",
        "1P:2D READ (wide to mi300x)",
    ]
    assert [way.accelerators(wide()) for way in candidates(wide(), Budget(gpus=16))[-2:]] == [16, 16]
    assert wide(layers=61).mixed == ()
    assert load("mi300x").mixed == ()


@pytest.mark.parametrize("mode", [Mode.READ, Mode.WRITE])
def test_a_request_between_two_sizes(mode: Mode) -> None:
    """A lone one in a split of two sizes: the wide engine's prompt, the narrow one's steps, and of the hand-over the
    slower figures: by hand."""
    profile = wide()
    question = Question(profile, Workload(Span(2000, 2000), Span(100, 100), rate=0.5), Slo(ttft=1.0, itl=0.1))
    mixed = Candidate(mode, 1, 1, profile="wide to mi300x")
    alone = floors(question, [mixed])[mixed.kind]
    narrow, fast = profile, profile.named("wide")
    assert narrow.decode is not None
    assert fast.prefill is not None
    step = narrow.decode.spec.cost.step_time(0, 1, 2000)
    moved = 2000 * narrow.handover.bytes_per_token / narrow.handover.bandwidth
    between = moved + narrow.handover.serialization if mode is Mode.READ else moved / 94
    prompt = fast.prefill.spec.cost.step_time(2000, 0, 0)
    assert alone.itl == pytest.approx(step)
    assert alone.ttft == pytest.approx(narrow.dispatch + prompt + between + fast.handover.tail + step)


def test_two_sizes_are_chosen_where_they_are_best() -> None:
    """Twelve accelerators, and a TTFT that only the wide engine's prompts meet: one wide prefill engine and a narrow
    decode engine, which is what the bench command needs, and with what was assumed."""
    question = Question(wide(), Workload(Span(6000, 6000), Span(300, 300), rate=1.0), Slo(ttft=0.42, itl=0.03))
    plan = decide(question, Budget(gpus=12), QUICK)
    said = words.report(plan)
    print(said)
    assert plan.best.candidate.shape == "1P:1D (wide to mi300x)"
    assert "To check it, with 1 prefill and 1 decode engine (wide to mi300x) ready:" in said
    assert "a hand-over between engines of two profiles costs, no profile says" in " ".join(said.split())
    assert document(plan)["answer"]["profile"] == "wide to mi300x"


def test_a_lone_request_is_judged_by_each_size() -> None:
    """A TTFT that only one size's engines meet takes the other out, by name."""
    question = Question(PROFILE, Workload(Span(2000, 2000), Span(200, 200), rate=0.5), Slo(ttft=0.185))
    plan = decide(question, Budget(gpus=8), QUICK)
    print(words.report(plan))
    assert plan.best.candidate.label == "1 colocated (mi300x-tp8)"
    assert "   A colocated engine (mi300x) is out: a TTFT SLO of 185 ms" in words.report(plan)
    assert document(plan)["impossible"].keys() == {"colocated mi300x", "read mi300x", "write mi300x"}


def test_a_wide_engine_costs_as_many_accelerators() -> None:
    """The price is of an engine of the first profile: one of twice its accelerators costs twice that."""
    question = Question(PROFILE, Workload(Span(2000, 2000), Span(200, 200), rate=0.5), Slo(ttft=0.185))
    settings = replace(QUICK, cost_per_engine_hour=2.0)
    wide = decide(question, Budget(gpus=8), settings).cost
    alone = decide(replace(question, profile=load("mi300x-tp8")), Budget(gpus=8), settings).cost
    assert wide is not None
    assert alone is not None
    assert wide.good == pytest.approx(2 * (alone.good or 0.0))


def test_several_profiles_are_counted_by_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    """`--profile A --profile B` plans with both; by engines, which differ in size, and twice the same are refused."""
    flags = ["--scenario", "2K/1K", "--rate", "8", "--slo-itl", "0.05", "--requests", "20", "--quick"]
    both = ["plan", "--profile", "mi300x", "--profile", "mi300x-tp8", *flags]
    assert main([*both, "--gpus", "8"]) == 0
    assert "1 colocated (mi300x-tp8)" in capsys.readouterr().out
    assert main([*both, "--engines", "2"]) == 1
    assert "say how many accelerators with --gpus" in capsys.readouterr().err
    assert main(["plan", "--profile", "mi300x", "--profile", "mi300x", *flags, "--gpus", "8"]) == 1
    assert "two of the profiles are called mi300x" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="too few for profile mi300x: an engine takes 4 or profile mi300x-tp8: "):
        candidates(PROFILE, Budget(gpus=2))
