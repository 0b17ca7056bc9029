"""The plan prints the command that would check it, and the bench takes it."""

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench import options
from pdserve.bench import plan as bench
from pdserve.bench.slo import Slo
from pdserve.bench.workload.files import read_trace
from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning import check, words
from pdserve.planner.planning.candidates import Budget
from pdserve.planner.planning.decision import Settings, decide
from pdserve.planner.planning.document import document
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.trial import Question
from pdserve.planner.planning.workload import Workload, of_trace
from pdserve.planner.profile_file import load

QUICK = Settings(requests=40, goodput=False, binding=False, switches=False)
SPLIT, EASY = Slo(ttft=1.0, itl=0.05), Slo(ttft=5.0, itl=0.5)
SIZES = Span(1900, 2100), Span(200, 200)


def plan_for(workload: Workload, slo: Slo, settings: Settings = QUICK) -> Plan:
    """Of two engines."""
    return decide(Question(load("mi300x"), workload, slo), Budget(engines=2), settings)


def taken(plan: Plan) -> tuple[bench.Plan, argparse.Namespace]:
    """What the bench makes of the command."""
    said = check.command(plan)
    print(said)
    program, sub, *flags = shlex.split(said)
    assert (program, sub) == ("pdserve", "bench")
    parser = argparse.ArgumentParser()
    options.add(parser)
    args = parser.parse_args(flags)
    return bench.make(options.wanted(args)), args


@pytest.mark.parametrize(
    ("workload", "slo", "settings"),
    [
        (Workload(*SIZES, rate=2.0), SPLIT, QUICK),
        (Workload(*SIZES, 0.5, rate=0.1234567, burstiness=0.5), EASY, replace(QUICK, seed=3)),
        (Workload(*SIZES, concurrency=8), Slo(itl=0.2, itl_of="mean", tpot=0.1, e2e=30.0), QUICK),
    ],
    ids=["split", "colocated, bursts and hits", "in flight"],
)
def test_bench_measures_what_was_planned(workload: Workload, slo: Slo, settings: Settings) -> None:
    """Lengths, hits, load, arrivals, requests, seed, objectives and the way that was chosen."""
    plan = plan_for(workload, slo, settings)
    measured, args = taken(plan)
    wanted = measured.wanted
    assert (wanted.prompt, wanted.output) == SIZES
    assert (wanted.sharing.hit_rate if wanted.sharing else 0.0) == workload.hit_rate
    assert wanted.rates == ((workload.rate,) if workload.rate is not None else ())
    assert wanted.concurrency == ((workload.concurrency,) if workload.concurrency is not None else ())
    assert (wanted.burstiness, wanted.seed, wanted.requests) == (workload.burstiness, settings.seed, 40)
    assert wanted.slo == slo
    way = plan.best.candidate
    assert (args.route, args.mode) == (("colocated", "") if way.colocated else ("", way.mode.value))


def test_trace_is_measured_once_through(tmp_path: Path) -> None:
    """By the name of its file, at the planned rate, and no more requests than it has."""
    path = tmp_path / "a trace.jsonl"
    path.write_text(
        "".join(json.dumps({"time": t, "prompt_tokens": 2000, "output_tokens": 100}) + "\n" for t in range(12))
    )
    measured, args = taken(plan_for(of_trace(*read_trace(path), 2.0, str(path)), EASY))
    assert args.trace == path
    assert args.rate == [2.0]
    assert len(measured.asks) == 12


def test_words_and_document_have_it() -> None:
    """With what has to run for it."""
    plan = plan_for(Workload(*SIZES, rate=2.0), SPLIT)
    said = words.report(plan)
    assert f"To check it, with 1 prefill and 1 decode engine ready:\n  {check.command(plan)}\n" in said
    assert document(plan)["check"] == check.command(plan)
    alone = plan_for(Workload(*SIZES, rate=0.1), EASY)
    assert "To check it, with 2 engines that serve whole requests ready:" in words.report(alone)
