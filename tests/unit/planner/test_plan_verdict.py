"""The verdict says no more than the plan knows: of a profile that lacks a kind, of a load that is not held."""

import json
from dataclasses import replace

import pytest

from pdserve.bench.report.words import number, seconds
from pdserve.bench.slo import Slo
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import figure, page, verdict, words
from pdserve.planner.planning.candidates import Budget, Candidate, Kind, candidates
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.present import Present
from pdserve.planner.planning.trial import Judged, Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import RoleProfile
from pdserve.planner.profile_file import load
from pdserve.planner.simulator import Mode
from pdserve.rpc.errors import ConfigError

QUICK = Settings(requests=20, goodput=False, binding=False, switches=False)
EASY = Slo(ttft=5.0, itl=0.5)


def of(profile: str = "mi300x", budget: Budget | None = None, rate: float = 1.0, slo: Slo = EASY) -> Plan:
    """2000 tokens in, 200 out; two engines where nothing else is said."""
    workload = Workload(Span(2000, 2000), Span(200, 200), rate=rate)
    return decide(Question(load(profile), workload, slo), budget or Budget(engines=2), QUICK)


def known(mean: float) -> Goodput:
    """A goodput that was found."""
    return Goodput(Interval(mean, 0.9 * mean, 1.1 * mean, 3))


def with_goodputs(plan: Plan, best: Goodput | None, opponent: Goodput | None = None) -> Plan:
    """The same with these of the best and its opponent."""
    assert plan.opponent is not None
    found = {plan.best.candidate: best, plan.opponent.candidate: opponent}
    return replace(plan, goodputs={way: value for way, value in found.items() if value is not None})


def short_of(plan: Plan, sought: Goodput | None) -> Plan:
    """The same, of which 80 % are good."""
    return replace(with_goodputs(plan, sought), attainment=Interval(0.8, 0.7, 0.9, 6))


@pytest.mark.parametrize(
    ("profile", "lacks", "rest"),
    [
        ("mi325x", "colocated engines", "The best split that it can tell of: 1P:1D, "),
        ("mi300x-tp8", "prefill and decode engines", "The best without a split that it can tell of: 2 colocated. "),
    ],
)
def test_profile_that_lacks_a_kind_gives_no_verdict(profile: str, lacks: str, rest: str) -> None:
    """A profile without colocated, or without prefill and decode costs, cannot say whether to split: words, JSON and
    page say so, and what is left is the best of what it knows."""
    plan = of(profile)
    said = verdict.answer(plan)
    print(said)
    assert said.startswith(f"-> Profile {profile} cannot say whether to split: it has no costs of {lacks}. {rest}")
    found = json.loads(json.dumps(document(plan)))
    assert (found["answer"]["split"], found["lacks"]) == (None, lacks)
    assert f"cannot say whether to split: it has no costs of {lacks}" in page.page(plan)


@pytest.mark.parametrize("profile", ["mi300x", "moai"])
def test_profile_with_all_kinds_gives_one(profile: str) -> None:
    """It lacks nothing, and JSON says whether to split."""
    plan = of(profile)
    assert "cannot say" not in verdict.answer(plan)
    found = document(plan)
    assert found["lacks"] is None
    assert found["answer"]["split"] is (not plan.best.candidate.colocated)


@pytest.mark.parametrize(
    ("sought", "said"),
    [
        (known(0.75), "fewer than 90%: the load is above the goodput of 0.75 req/s."),
        (known(1.1), "fewer than 90%: the load is as high as the goodput, about 1.1 req/s."),
        (Goodput(None, "why"), "fewer than 90%: the load is above the goodput (not found: why)."),
        (None, "fewer than 90%: the load is above the goodput (not looked for)."),
    ],
    ids=["below", "at the edge", "not found", "not looked for"],
)
def test_load_above_goodput_is_said(sought: Goodput | None, said: str) -> None:
    """Where fewer than 90 % are good the verdict names the goodput, or why there is none; where enough are, it does not
    speak of it."""
    plan = of()
    assert "goodput" not in verdict.answer(with_goodputs(plan, sought))
    assert verdict.answer(short_of(plan, sought)).endswith(said)
    assert (document(plan)["held"], document(short_of(plan, sought))["held"]) == (True, False)


@pytest.mark.parametrize(
    ("best", "other", "said"),
    [
        (0.5, 5.05, " The split holds 10 times as many requests."),
        (5.0, 2.0, " Colocated engines hold 2.5 times as many requests."),
        (5.0, 5.1, " Both hold about as much."),
    ],
)
def test_ratio_is_of_the_larger_goodput(best: float, other: float, said: str) -> None:
    """Of the chosen colocated engines and the split, whichever holds more is named, with a factor above 1."""
    plan = of()
    assert plan.best.candidate.colocated
    assert verdict.ratio(with_goodputs(plan, known(best), known(other))) == said


def test_idle_accelerators_are_said() -> None:
    """Six accelerators are one engine of four and two that are idle; eight leave none. One engine is no verdict on
    splits, of which the plan says that they take two."""
    plan = of(budget=Budget(gpus=6))
    assert "6 accelerators (profile mi300x; 2 of them are idle, an engine takes 4)" in words.question(plan)
    assert document(plan)["accelerators_idle"] == 2
    assert "   A split takes two engines at least." in verdict.reasons(plan)
    assert "idle" not in words.question(of(budget=Budget(gpus=8)))


def test_too_few_for_an_engine_says_what_it_takes() -> None:
    """By accelerators: how many an engine takes, each kind where they differ; by engines: that a split takes two."""
    with pytest.raises(ConfigError, match=r"^1 engine is too few for profile mi325x: it knows only splits"):
        candidates(load("mi325x"), Budget(engines=1))
    profile = load("mi325x")
    assert profile.decode is not None
    uneven = replace(profile, decode=RoleProfile(profile.decode.spec, 8))
    with pytest.raises(ConfigError, match="a prefill engine takes 4, a decode engine takes 8; it knows only splits"):
        candidates(uneven, Budget(gpus=9))


def test_without_an_slo_nothing_is_said_of_objectives() -> None:
    """A closed loop without an SLO is compared by requests a second: no words, columns or costs of good requests."""
    workload = Workload(Span(2000, 2000), Span(200, 200), concurrency=8)
    settings = replace(QUICK, binding=True, cost_per_engine_hour=2.0)
    plan = decide(Question(load("mi300x"), workload, Slo()), Budget(engines=2), settings)
    said = words.report(plan)
    print(said)
    for word in ("objective", "attainment", "missed", "good"):
        assert word not in said
    assert "-> Do not split: 2 colocated. 1.26 req/s (" in said
    assert "The best split, 1P:1D WRITE, comes to 1.21 req/s." in said
    assert document(plan)["held"] is None
    assert figure.png(plan).startswith(b"\x89PNG")


def test_floor_names_no_internals() -> None:
    """An SLO that no mode can meet is refused in words for people, and with the SLO as it was given."""
    with pytest.raises(
        ConfigError, match=r"a colocated engine: a P99 ITL SLO of 0\.1 ms .*; a split in READ: "
    ) as error:
        of(slo=Slo(itl=0.0001))
    assert "COLOCATED" not in str(error.value)


@pytest.mark.parametrize(
    ("ttft", "cause"),
    [
        (0.6, "too few engines. "),
        (0.21, "a TTFT SLO of 210 ms leaves little above the 190 ms of a request that is alone"),
    ],
    ids=["engines", "floor"],
)
def test_too_few_engines_only_where_more_would_help(ttft: float, cause: str) -> None:
    """Of a load that no way holds the cause is too few engines; where a lone request takes nearly all of the SLO, that
    is it."""
    plan = of(rate=30.0, slo=Slo(ttft=ttft, itl=0.05))
    (said,) = verdict.lighter(plan)
    print(said)
    assert f"whatever is chosen: {cause}" in said
    assert ("too few engines" in said) is (ttft == 0.6)


def test_too_few_engines_for_what_an_slo_leaves() -> None:
    """Where an SLO takes the splits out, and the rest has room, engines are missing for that rest."""
    plan = of(rate=30.0, slo=Slo(ttft=0.6, itl=0.05))
    held = replace(plan, impossible={Kind(Mode.READ): ["why"]})
    assert "too few engines for the ways that the SLO leaves. " in verdict.lighter(held)[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [(2750.4, "2,750"), (2749.0, "2,749"), (8.0, "8"), (0.1234, "0.123"), (1.95e-5, "0.0000195"), (0.0, "0")],
)
def test_numbers_have_no_exponent(value: float, said: str) -> None:
    """Three digits, or all of a whole number's; thousands are parted."""
    assert number(value) == said


def test_long_times_are_plain() -> None:
    """Milliseconds below a second, seconds above, however many."""
    assert [seconds(value) for value in (0.0214, 1.0, 2754.3)] == ["21.4 ms", "1.00 s", "2754 s"]


@pytest.mark.parametrize(
    ("worth", "said"),
    [
        (0.5, "2 colocated is better or as good."),
        (1.0, "2 colocated is better or as good."),
        (2.0, "better than 2 colocated, the best of the ways that were weighed."),
    ],
)
def test_what_runs_now_is_compared_with_the_best(worth: float, said: str) -> None:
    """By their scores at one load: a layout that was not weighed may be the better one, and then it is not said to be
    the worse. Where the plan is for a lower load the two are not compared."""
    plan = of()
    assert plan.best.candidate.label == "2 colocated"
    layout = Candidate(Mode.READ, 1, 1, 1)
    trials = tuple(replace(one, score=worth * one.score) for one in plan.best.trials)
    runs = replace(plan, present=Present(layout, Judged(layout, trials), plan.attainment, None))
    assert _runs_now(runs).endswith(f"; {said}")
    lowered = replace(runs, asked=plan.asked.at(2.0))
    assert _runs_now(lowered).endswith("; 2 colocated is the best at 1 req/s.")


def _runs_now(plan: Plan) -> str:
    (line,) = (one.text for one in words.after(plan) if one.text.startswith("Runs now: "))
    print(line)
    return line


def test_profile_is_called_by_its_own_name() -> None:
    """Also where a sentence begins with the way that is named after it."""
    mine = replace(load("mi300x"), name="Mine-A", siblings=(replace(load("mi300x"), name="Mine-B"),))
    workload = Workload(Span(2000, 2000), Span(200, 200), rate=4.0)
    plan = decide(Question(mine, workload, Slo(ttft=1.0, itl=0.05)), Budget(gpus=8), QUICK)
    assert plan.opponent is not None
    assert not plan.best.candidate.colocated
    said = " ".join(verdict.reasons(plan))
    print(said)
    assert f" {plan.opponent.candidate.shape} come to " in said
