"""Attainment, goodput, ratios and drift of a comparison, and how they are printed. Pure."""

import dataclasses

import msgspec
import pytest

from pdserve.bench.bounds import Bounded, divided
from pdserve.bench.compare.budget import Trial
from pdserve.bench.compare.chapter import chapter
from pdserve.bench.compare.configurations import CONFIGURATIONS, Key
from pdserve.bench.compare.folder import Cell, Share, State
from pdserve.bench.compare.objectives import Sample, calibrated
from pdserve.bench.compare.outcome import outcome
from pdserve.bench.compare.ratios import Curve, against, crossing, curve
from pdserve.bench.compare.sections import figure, mean_cores, ratios, sections
from pdserve.bench.compare.sweep import doubts, joined
from pdserve.bench.compare.tables import head, report
from pdserve.bench.report.ratios import share_ratio_range
from pdserve.bench.results import Tried
from tests.unit.bench.bench_compare_examples import MACHINE, record, results, run, settings


def _curve(key: Key, *shares: float) -> Curve:
    """Attainments at 1, 2, ... requests a second, of 10 requests each."""
    runs = [run(float(place), round(share * 10), 10) for place, share in enumerate(shares, 1)]
    return curve(key, [runs], 0.9)


def test_repeats_are_pooled_by_requests() -> None:
    """9 of 10 and 3 of 30 are 12 of 40, not the mean of two shares; each repeat is still seen."""
    found = curve("d", [[run(1.0, 9, 10)], [run(1.0, 3, 30)]], 0.9)
    (point,) = found.points
    assert point.attainment == pytest.approx(0.3)
    assert point.good_rate == pytest.approx(0.3)
    assert point.each == (0.9, 0.1)
    assert point.requests == 40


def test_a_run_that_broke_off_is_left_out() -> None:
    """What was sent of it has seen a part of the load only."""
    found = curve("d", [[run(1.0, 9, 10), run(2.0, 9, 10, partial=True)]], 0.9)
    assert [point.load.value for point in found.points] == [1.0]


def test_goodput_is_the_highest_tried_rate_that_held() -> None:
    """Also behind one that fell short."""
    assert _curve("d", 1.0, 0.9, 0.5).goodput.value == 2.0
    assert _curve("d", 1.0, 0.5, 0.9).goodput.value == 3.0
    assert _curve("d", 0.5, 0.5).goodput.value == 0.0


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1.0, 0.8), Bounded(1.5)),
        ((1.0, 0.9, 0.4), Bounded(2.0)),
        ((1.0, 0.5, 0.95, 0.85), Bounded(3.5)),
        ((0.8, 0.5), Bounded(1.0, "at most", "the lowest rate fell short")),
        ((1.0, 0.95), Bounded(2.0, "at least", "the highest rate held")),
        ((), Bounded(None, "unknown", "no run")),
    ],
)
def test_interpolation_is_between_tried_rates_only(shares: tuple[float, ...], expected: Bounded) -> None:
    """A straight line from the highest rate that held to the next; outside of the rates there is a bound."""
    found = crossing([Tried(float(place), share) for place, share in enumerate(shares, 1)], 0.9)
    assert found.value == pytest.approx(expected.value)
    assert (found.bound, found.why) == (expected.bound, expected.why)


def test_ratios_are_at_equal_rates() -> None:
    """Of attainments at each rate that both have, and of goodputs."""
    one = against(_curve("d", 1.0, 0.9, 0.6), _curve("b", 0.9, 0.3))
    assert [rate for rate, _ in one.attainments] == [1.0, 2.0]
    assert [found.attainment for _, found in one.attainments] == pytest.approx([1.0 / 0.9, 3.0])
    assert one.goodput.known == Bounded(2.0)
    assert one.attainments[1][1].attainment_range == share_ratio_range(9, 10, 3, 10)
    assert one.crossing.value == pytest.approx(2.0)


def test_a_ratio_over_nothing_is_a_bound() -> None:
    """No good request below: the ratio is at least its interval's lower end; over nothing it is unknown."""
    one = against(_curve("d", 0.8, 0.0), _curve("b", 0.0, 0.0))
    (_, low), (_, high) = one.attainments
    assert (low.attainment, low.attainment_range) == (None, share_ratio_range(8, 10, 0, 10))
    assert high.attainment_range is None
    assert ratios([one], [1.0, 2.0]).rows == (("WRITE / (b)", "at least 2.66", "–"),)


AT_LEAST, AT_MOST = Bounded(2.0, "at least", "held"), Bounded(1.0, "at most", "fell short")


@pytest.mark.parametrize(
    ("over", "under", "expected"),
    [
        (Bounded(3.0), Bounded(1.5), (2.0, "")),
        (AT_LEAST, Bounded(1.0), (2.0, "at least")),
        (AT_LEAST, AT_MOST, (2.0, "at least")),
        (Bounded(3.0), AT_MOST, (3.0, "at least")),
        (AT_MOST, Bounded(2.0), (0.5, "at most")),
        (AT_MOST, AT_LEAST, (0.5, "at most")),
        (Bounded(3.0), AT_LEAST, (1.5, "at most")),
        (AT_MOST, AT_MOST, (None, "unknown")),
        (AT_LEAST, AT_LEAST, (None, "unknown")),
        (Bounded(None, "unknown", "no run"), Bounded(1.0), (None, "unknown")),
    ],
)
def test_bounds_divide_as_bounds(over: Bounded, under: Bounded, expected: tuple[float | None, str]) -> None:
    """A lower bound over an upper one is a lower bound; two of a kind say nothing."""
    found = divided(over, under)
    assert (found.value, found.bound) == expected
    assert bool(found.why) == bool(over.bound or under.bound)


def test_what_would_mislead_is_said() -> None:
    """Answers on another path than the configuration's, cached prompts, a machine that did something else."""
    write = CONFIGURATIONS["d"]
    assert doubts(write, results([run(1.0, 1, 2, mode="write")])) == []
    assert doubts(write, results([run(1.0, 1, 2)])) == ["2 of 2 answers were not made in mode write"]
    assert doubts(CONFIGURATIONS["b"], results([run(1.0, 1, 2, mode="read")]))[0].endswith("by one engine")
    cached = dataclasses.replace(run(1.0, 0, 0), requests=(record(0, (), "write", cached=16),))
    assert doubts(write, results([cached])) == ["16 prompt tokens came from a prefix cache, none should have"]
    shares = [Share(1.0, 2.0, {"others": 0.75, "proxy": 0.9}), Share(2.0, 2.0, {"others": 0.05})]
    (said,) = doubts(write, results([run(1.0, 1, 2, mode="write")]), shares)
    assert said == "something else on this machine used cores: 0.75 at 1 req/s"


def test_joined_measurements_stay_partial() -> None:
    """The runs of both, and the reason of the one that broke off."""
    found = joined(results([run(1.0, 1, 2)]), results([run(2.0, 1, 2)], partial=True))
    assert [one.rate for one in found.runs] == [1.0, 2.0]
    assert found.partial
    assert found.why_partial == "the endpoint failed"


def test_engines_of_one_role_are_added_and_runs_weighted_by_time() -> None:
    """Two engines of 0.5 cores are one of 1; a run of three seconds counts three times."""
    shares = [Share(1.0, 1.0, {"both-0": 0.5, "both-1": 0.5, "proxy": 0.4}), Share(2.0, 3.0, {"both-0": 2.0})]
    assert mean_cores(shares) == pytest.approx({"both": 1.75, "proxy": 0.1})


def _cell(key: Key, repeat: int) -> Cell:
    return Cell(key, repeat, 0, "2026-01-01T00:00:00Z", 20.0, ("pdserve", "up"), (Share(1.0, 2.0, {"proxy": 0.12}),))


def _goods(**goods: int) -> list[tuple[Key, int]]:
    return [(key, goods[key]) for key in CONFIGURATIONS if key in goods]


def test_an_outcome_has_curves_ratios_and_one_document_a_configuration() -> None:
    """Both splits against both opponents, whatever order the cells have; the pair is the report's base."""
    cells = [(_cell(key, repeat), results([run(1.0, good, 10)], label=key))
             for repeat in (1, 0) for key, good in _goods(e=5, d=10, b=2, c=8, a=1)]  # fmt: skip
    found = outcome(cells, 0.9)
    assert [one.key for one in found.curves] == ["a", "b", "c", "d", "e"]
    pairs = {(one.over, one.under): one.attainments[0][1].attainment for one in found.ratios}
    assert pairs[("d", "b")] == pytest.approx(5.0)
    assert pairs[("c", "b")] == pytest.approx(4.0)
    assert pairs[("d", "e")] == pytest.approx(2.0)
    assert pairs[("c", "e")] == pytest.approx(1.6)
    assert [one.label for one in found.pooled] == ["b", "a", "c", "d", "e"]
    assert all(len(one.runs) == 2 for one in found.pooled)


def test_the_tables_name_every_quantity() -> None:
    """Attainment, good rate, drift, both goodputs, all ratios with their rate, and the cores of every process."""
    cells = [(_cell(key, repeat), results([run(1.0, good - repeat, 10)], label=key))
             for repeat in (0, 1) for key, good in _goods(b=2, d=10)]  # fmt: skip
    found = outcome(cells, 0.9)
    said = report(settings(), found.curves, found.ratios, [cell for cell, _ in cells])
    for words in (
        "(d) WRITE 1P1D", "95% (19 of 20; 0.95/s)", "15% (3 of 20; 0.15/s)", "90% .. 100%", "10% .. 20%",
        "highest tried", "interpolated", "WRITE / (b)", "attainment at 1/s", "6.33 (2.", "below 1", "0.12", "client",
        "Ratios of attainments at each rate, which are the ratios of good rates too",
        "(d) WRITE 1P1D: too few requests for a bound: 20 cannot prove 90%, even all good it takes 35",
    ):  # fmt: skip
        assert words in said, words


def test_the_report_has_what_the_terminal_has() -> None:
    """Every table with its heading and lines, how the objectives came about, and which budgets were tried."""
    cells = [
        (_cell(key, 0), results([run(1.0, good, 10)], label=f"({key}) so")) for key, good in _goods(b=2, d=10, e=5)
    ]
    found = outcome(cells, 0.9)
    shown = sections(settings(), found.curves, found.ratios, [cell for cell, _ in cells])
    calibration = calibrated([Sample(0.2, (0.1, 0.1)), Sample(0.2, (0.1, 0.4))], 8)
    state = State(settings().told(), MACHINE, calibration=calibration, trials=(Trial(16, 0.5, 0.8),), budget=16)
    made = chapter(settings(), state, shown)
    text = report(settings(), found.curves, found.ratios, [cell for cell, _ in cells])
    for heading, table, lines in made.tables:
        assert heading in text
        for cell in (cell for row in (table.rows if table else ()) for cell in row):
            assert cell in text
        assert all(line in text for line in lines)
    assert [one[0] for one in made.tables] == [one.heading for one in shown]
    said = " ".join(made.said)
    assert "SLO: TTFT 1.000 s = 5 x 0.200 s" in said
    assert "CAUTION: only 1 of 2 calibration requests met the objectives" in said
    assert "a token budget of 16, of those that were tried (16: 50%, of the ITL alone 80%)." in said
    assert found.letters == ("B", "D", "E")
    assert found.rate == 1.0
    assert {one.label for one in found.pooled} == {"so"}, "the letter says it already"


def test_the_report_compares_where_somebody_holds_half() -> None:
    """At the highest rate at which one configuration has half of its requests good; above, all have lost. Where nobody
    has half anywhere the report chooses."""
    cells = [
        (_cell(key, 0), results([run(1.0, good, 10), run(2.0, good // 2, 10), run(4.0, 4, 10)], label=key))
        for key, good in _goods(b=9, d=10)
    ]
    assert outcome(cells, 0.9).rate == 2.0
    assert outcome([(_cell("b", 0), results([run(1.0, 4, 10)]))], 0.9).rate is None


def test_a_reason_is_said_once_with_all_that_it_is_of() -> None:
    """Both goodputs of a ratio, and all ratios that lack the same, are one line."""
    cells = [(_cell(key, 0), results([run(1.0, good, 10)], label=key)) for key, good in _goods(b=2, c=10, d=10)]
    found = outcome(cells, 0.9)
    (why,) = [one for one in sections(settings(), found.curves, found.ratios, []) if one.heading.startswith("Where")]
    print(*why.lines, sep="\n")
    (line,) = [line for line in why.lines if "the lowest rate fell short" in line]
    assert line.endswith("goodputs of WRITE / (b), goodputs of READ / (b)")


def test_a_bound_is_printed_as_one() -> None:
    """No figure looks more certain than it is."""
    assert figure(Bounded(1.5)) == "1.50"
    assert figure(Bounded(1.5, "at least")) == "at least 1.50"
    assert figure(Bounded(1.5, "at most")) == "below 1.50"
    assert figure(Bounded(None, "unknown", "no run")) == "–"


def test_the_head_says_what_scaled_time_means() -> None:
    """Boundeds of scaled costs are not those of the hardware, and the output says so."""
    said = head(settings(scale=0.1), (CONFIGURATIONS["b"],), 2, MACHINE, 600.0)
    assert "1 s here stands for 10 s" in said
    assert "about 10 minutes" in said
    (tenth,) = [line for line in head(settings(scale=0.3), (CONFIGURATIONS["b"],), 1, MACHINE, 20.0).splitlines()
                if "stands for" in line]  # fmt: skip
    assert "stands for 3.333 s" in tenth
    assert "stands for" not in head(settings(), (CONFIGURATIONS["b"],), 2, MACHINE, 600.0)


def test_the_head_says_which_rates_cannot_prove_anything() -> None:
    """Ten requests a rate cannot show 90 %, in three repeats neither; in four they can. One is no plural."""
    few, many = (head(settings(), (CONFIGURATIONS["b"],), repeats, MACHINE, 20.0) for repeats in (3, 4))
    assert "too few requests for a bound at 1 req/s (30), 2 req/s (30): to prove 90%, even all good it takes 35" in few
    assert "too few" not in many
    once = head(settings(), (CONFIGURATIONS["b"],), 1, MACHINE, 20.0)
    assert "1 repeat\n" in once
    assert once.splitlines()[-2] == "about 1 minute"


def test_a_single_repeat_has_no_drift() -> None:
    """A table of a range of one value would look like a finding."""
    for repeats, there in ((1, False), (2, True)):
        found = outcome([(_cell("b", n), results([run(1.0, 5, 10)])) for n in range(repeats)], 0.9)
        said = report(settings(), found.curves, found.ratios, [])
        assert ("Drift between repeats" in said) == there
        assert ("of the repeats" in said) == there


def test_what_is_written_of_a_curve_has_no_requests() -> None:
    """compare.json holds figures; the requests are in the results beside it."""
    told = _curve("d", 1.0, 0.9).told()
    assert [(one["rate"], one["requests"], one["good"]) for one in told["points"]] == [(1.0, 10, 10), (2.0, 10, 9)]
    assert b'itls":[' in msgspec.json.encode(told)
    assert b"prompt_tokens" not in msgspec.json.encode(told)
