"""What is compared, at which load, and which ratios follow. Fake: all results are made up by a seeded model."""

import random
from dataclasses import replace

import pytest

from pdserve.bench import words as terminal
from pdserve.bench.bounds import Bounded
from pdserve.bench.goodput import wilson
from pdserve.bench.report import comparison, ratios
from pdserve.bench.report.contents import contents_of
from pdserve.bench.report.entries import Level, chosen_level, entries_of
from pdserve.bench.results import Goodput, Results, Run, Tried
from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError
from tests.unit.bench.bench_report_examples import COLOCATED, READ, WRITE, closed, example

AT_8 = Level("rate", 8)


def small(*rates: float, attainment: float = 0.5, **asked: object) -> Results:
    """A file with runs at these rates of 20 requests, all with this attainment."""
    made = example(WRITE, rates, requests=20, tokens=3, goodput=False)
    runs = tuple(of(run, attainment) for run in made.runs)
    return replace(made, runs=runs, **asked)  # type: ignore[arg-type]


def of(run: Run, attainment: float) -> Run:
    """The run with another attainment."""
    good_rate = attainment * (run.rate or 0.0)
    return replace(run, summary=replace(run.summary, attainment=attainment, good_rate=good_rate))


def goodput(value: float, high: float | None, threshold: float = 0.9) -> Goodput:
    """A search's outcome."""
    return Goodput(threshold, value, value, high, (), "an example")


def test_the_comparison_is_at_the_highest_load_that_most_have() -> None:
    """A rate that only one file has is not where files are compared, however high."""
    entries = entries_of([small(2, 8), small(2, 8), small(2, 8, 12)])
    assert chosen_level(entries, None) == AT_8


def test_a_told_rate_is_taken_or_refused_with_what_there_is() -> None:
    """A typing error does not compare something else."""
    entries = entries_of([small(2, 8)])
    assert chosen_level(entries, 2) == Level("rate", 2)
    with pytest.raises(ConfigError, match=r"no file has a run at 3 req/s; there are: 2, 8"):
        chosen_level(entries, 3)


def test_a_report_of_nothing_is_refused() -> None:
    """No file is an error, a file without runs is not: it may be all that was kept."""
    with pytest.raises(ConfigError, match="at least one results file"):
        entries_of([])
    assert contents_of([replace(small(2), runs=())]).sections == ()


def test_repeated_runs_are_pooled_by_their_requests() -> None:
    """Two runs of 20 with 50 % and 100 % are 30 of 40."""
    made = small(8)
    twice = replace(made, runs=(made.runs[0], of(made.runs[0], 1.0)))
    point = entries_of([twice])[0].points[AT_8]
    assert (point.good, point.requests, point.attainment) == (30, 40, 0.75)
    assert point.mean("good_rate") == pytest.approx(0.75 * 8)


def test_letters_go_on_past_z() -> None:
    """Any number of files can be told apart; a lone one needs no letter."""
    many = entries_of([small(8)] * 28)
    assert [many[place].letter for place in (0, 25, 26, 27)] == ["A", "Z", "AA", "AB"]
    assert entries_of([small(8)])[0].name == "WRITE 1P1D"


def test_letters_may_be_given() -> None:
    """One for each file, whatever their order."""
    assert [one.name for one in entries_of([small(8)] * 2, ("B", "A"))] == ["B WRITE 1P1D", "A WRITE 1P1D"]


def test_the_interval_of_a_share_is_wilsons() -> None:
    """73 of 100: 63.6 % to 80.7 %, as tables have it; nothing and everything stay inside [0, 1]."""
    assert wilson(0.73, 100) == pytest.approx((0.636, 0.807), abs=5e-4)
    assert wilson(0.0, 10)[0] == 0
    assert wilson(1.0, 10)[1] == pytest.approx(1)
    assert wilson(0.0, 0) == (0, 1)


def test_each_ratio_is_named_by_what_it_divides_and_where() -> None:
    """The published 2.5 is a ratio of attainments at r = 8 and is called that."""
    assert ratios.ratio_columns(AT_8) == (
        "ratio of attainments at r = 8",
        "ratio of good rates at r = 8",
        "ratio of goodputs",
    )


def test_ratios_are_to_the_first_file() -> None:
    """73 % over 29 % is 2.52, and goodputs divide as far as their uncertainty allows."""
    base, ours = entries_of(
        [small(8, attainment=0.25, goodput=goodput(2, 4)), small(8, attainment=0.75, goodput=goodput(6, 7))]
    )
    found = ratios.ratios(base.points[AT_8], ours.points[AT_8])
    assert found.attainment == pytest.approx(3)
    assert found.good_rate == pytest.approx(3)
    goodputs = ratios.goodput_ratio(base.goodput, ours.goodput)
    assert (goodputs.low, goodputs.known, goodputs.high) == (1.5, Bounded(3.0), 3.5)
    assert ratios.goodput_ratio_words(goodputs) == "3.00 (1.50 to 3.50)"


def test_the_interval_of_a_ratio_holds_at_the_edges() -> None:
    """Between the edges it is near the one by the logarithm (Katz 1978): 30 of 100 over 15 of 100 is 2, from 1.149 to
    3.482. Where both shares are 1 it is as wide as their own intervals; to a base of 0 there is none."""
    found = ratios.share_ratio_range(30, 100, 15, 100)
    assert found == pytest.approx((1.149, 3.482), rel=0.02)
    low, high = wilson(1.0, 20)[0], 1 / wilson(1.0, 40)[0]
    assert ratios.share_ratio_range(20, 20, 40, 40) == pytest.approx((low, high))
    nothing = ratios.share_ratio_range(0, 10, 5, 10)
    assert nothing is not None
    assert nothing[0] == 0
    assert 0 < (nothing[1] or 0) < 1
    assert ratios.share_ratio_range(0, 10, 0, 10) is None


def test_there_is_no_ratio_to_nothing() -> None:
    """A base that met nothing, was not measured there, or was searched at another threshold has no ratio."""
    base, ours = entries_of([small(8, attainment=0.0, goodput=goodput(2, 4, 0.5)), small(8, 9, goodput=goodput(6, 7))])
    found = ratios.ratios(base.points[AT_8], ours.points[AT_8])
    assert (found.attainment, found.good_rate) == (None, None)
    assert ratios.ratios(base.points.get(Level("rate", 9)), ours.points[AT_8]) == ratios.Ratios()
    assert ratios.goodput_ratio(base.goodput, ours.goodput).known.value is None


def test_an_open_search_bounds_its_ratio_on_one_side_only() -> None:
    """Where no tried rate failed the ratio has no upper bound, and says so."""
    base, ours = entries_of([small(8, goodput=goodput(2, 4)), small(8, goodput=goodput(8, None))])
    found = ratios.goodput_ratio(base.goodput, ours.goodput)
    assert ratios.goodput_ratio_words(found) == "at least 4.00 (2.00 with the uncertainty of both)"
    assert comparison.goodput_words(ours) == "at least 8 req/s"
    assert comparison.goodput_words(base) == "2 req/s (2 to 4)"


def test_a_ratio_to_a_base_that_met_nothing_has_a_lower_end() -> None:
    """30 of 40 over 0 of 40 has no value, yet it is surely not small. Seed 11: of made-up pairs whose true ratio is 6,
    at least 95 % have an interval, with or without an upper end, that contains it."""
    found = ratios.ratios(*(entries_of([small(8, attainment=share)])[0].points[AT_8] for share in (0.0, 0.75)))
    assert found.attainment is None
    assert found.attainment_range is not None
    assert found.attainment_range[1] is None
    assert ratios.attainment_ratio_words(found).startswith("at least ")
    chance, inside = random.Random(11), 0
    for _ in range(1000):
        good, base = (sum(chance.random() < share for _ in range(25)) for share in (0.6, 0.1))
        told = ratios.share_ratio_range(good, 25, base, 25)
        inside += told is None or (told[0] <= 6 and (told[1] is None or told[1] >= 6))
    assert inside >= 940


def test_at_least_over_below_is_at_least() -> None:
    """A base of which no rate held, and another of which none fell short: the ratio has a lower bound, not no value."""
    base = replace(goodput(0, None), tried=(Tried(2.0, 0.1, 50),))
    ours = replace(goodput(6, None), tried=(Tried(2.0, 1.0, 50), Tried(6.0, 1.0, 50)))
    assert ratios.goodput_ratio_words(ratios.goodput_ratio(base, ours)) == "at least 3.00"
    assert ratios.goodput_ratio_words(ratios.goodput_ratio(ours, base)) == "below 0.33"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Goodput(0.9, 6.0, 6.0, None, (), ""), "at least 6 req/s"),
        (Goodput(0.9, 6.0, 2.0, None, (), ""), "6 req/s (at least 2)"),
        (Goodput(0.9, 12.71875, 2.0, 14.125, (), ""), "12.72 req/s (2 to 14.12)"),
        (Goodput(0.9, 6.0, 0.0, 8.0, (Tried(6.0, 0.91, 50),), ""), "6 req/s (below 8)"),
        (Goodput(0.9, 6.0, 0.0, None, (Tried(6.0, 0.91, 50),), ""), "6 req/s, without bounds"),
        (
            Goodput(0.9, 6.0, 0.0, None, (Tried(6.0, 1.0, 24),), ""),
            "6 req/s, without bounds",
        ),
        (Goodput(0.9, 0.0, 0.0, None, (Tried(4.0, 0.5, 9), Tried(2.0, 0.5, 9)), ""), "below 2 req/s"),
    ],
)
def test_report_and_terminal_say_one_thing_of_a_goodput(found: Goodput, said: str) -> None:
    """`at least` stands before the rate that held by more than its interval, and before no other."""
    entry = entries_of([small(8, goodput=found)])[0]
    assert comparison.goodput_words(entry) == said
    assert f": {said}" in terminal.goodput(found)
    assert ("24 cannot prove 90%" in terminal.goodput(found)) == any(one.requests == 24 for one in found.tried)


def test_other_content_is_the_same_workload() -> None:
    """Two measurements with the same flags have other prompts, so that no cache knows them: a fact, no difference."""
    made = small(8)
    lengths = [{"kind": "fixed", "prompt": "9", "content_seed": seed} for seed in (1, 2)]
    same = entries_of([replace(made, workload=replace(made.workload, lengths=one)) for one in lengths])
    assert comparison.differences(same) == []
    assert [comparison.facts(entry)["content seed"] for entry in same] == ["1", "2"]
    other = replace(made, workload=replace(made.workload, lengths={"kind": "fixed", "prompt": "8"}))
    assert comparison.differences([same[0], entries_of([made, other])[1]]) == ["workload"]


def test_what_makes_a_comparison_unfair_is_named() -> None:
    """Another SLO or workload is told; another mode or transport is what is compared."""
    same = entries_of([example(WRITE, (8.0,), requests=5, tokens=3), example(READ, (8.0,), requests=5, tokens=3)])
    assert comparison.differences(same) == []
    other = entries_of(
        [
            example(WRITE, (8.0,), requests=5, tokens=3),
            example(COLOCATED, (8.0,), requests=6, tokens=3, slo=Slo(ttft=2.0)),
        ]
    )
    assert comparison.differences(other) == ["requests a run", "SLO"]


def test_a_closed_loop_is_compared_by_requests_in_flight() -> None:
    """It has no offered rate, so nothing in the report pretends one."""
    contents = contents_of([closed(example(WRITE, (1.0, 8.0), requests=5, tokens=3))])
    assert contents.load == Level("concurrency", 64)
    assert contents.load.symbol == "N = 64"
    assert [picture.key for picture in contents.sections[0].shown] == [
        "attainment-concurrency",
        "good-rate-concurrency",
        "throughput-concurrency",
    ]
