"""A plan as a JSON document. Pure. Seconds, tokens, requests a second; shares from 0 to 1."""

from dataclasses import asdict
from typing import Any

from pdserve.planner.planning import words
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.decision import Plan
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.trial import Judged
from pdserve.planner.planning.workload import Workload

SCHEMA = "pdserve.plan/1"
"""Changes when a member changes its meaning or goes."""


def document(plan: Plan) -> dict[str, Any]:
    """All that the words say, as numbers."""
    best = plan.best.candidate
    return {
        "schema": SCHEMA,
        "profile": plan.question.profile.name,
        "slo": asdict(plan.question.slo),
        "asked": _workload(plan.asked),
        "planned": _workload(plan.question.workload),
        "lacks": plan.lacks or None,
        "accelerators_idle": plan.idle,
        "answer": {"split": None if plan.lacks else not best.colocated, **_candidate(best)},
        "attainment": _interval(plan.attainment),
        "held": None if plan.question.slo.empty else plan.held,
        "good_rate": _interval(plan.score),
        "goodput": _interval(plan.goodput),
        "goodput_not_found": _why(plan.sought),
        "opponent": None
        if plan.opponent is None
        else {
            **_candidate(plan.opponent.candidate),
            "attainment": _interval(plan.opponent_attainment),
            "goodput": _interval(plan.opponent_goodput),
            "goodput_not_found": _why(plan.opponent_sought),
        },
        "impossible": {mode.value: said for mode, said in plan.impossible.items()},
        "floors": {
            mode.value: {"ttft": floor.ttft, "itl": floor.itl, "e2e": floor.e2e} for mode, floor in plan.floors.items()
        },
        "ways": [_judged(one) for one in plan.screened.all],
        "binding": None
        if plan.binding is None
        else {
            "rate": plan.binding.rate,
            "machine": plan.binding.machine,
            "objective": plan.binding.objective,
            "gains": dict(plan.binding.gains),
        },
        "switches": [
            {
                "what": one.what,
                "unit": one.unit,
                "now": one.now,
                "still": one.still,
                "other": one.other,
                "to": None if one.to is None else _candidate(one.to),
            }
            for one in plan.switches
        ],
        "cost_per_million_tokens": None if plan.cost is None else asdict(plan.cost),
        "runs": {"requests": plan.screened.count, "seed": plan.screened.seed, "simulated": plan.screened.runs},
        "words": words.report(plan),
    }


def _workload(of: Workload) -> dict[str, Any]:
    typical = of.typical
    return {
        "rate": of.rate,
        "concurrency": of.concurrency,
        "burstiness": of.burstiness,
        "prompt_tokens": typical.prompt,
        "output_tokens": typical.output,
        "hit_tokens": typical.hit,
        "trace_requests": len(of.trace.jobs) if of.trace is not None else None,
    }


def _candidate(of: Candidate) -> dict[str, Any]:
    return {
        "label": of.label,
        "mode": of.mode.value,
        "prefill": of.prefills,
        "decode": of.decodes,
        "colocated": of.engines,
    }


def _interval(of: Interval | None) -> dict[str, float] | None:
    return None if of is None else {"mean": of.mean, "low": of.low, "high": of.high, "runs": of.runs}


def _why(of: Goodput | None) -> str | None:
    return of.why if of is not None and of.value is None else None


def _judged(one: Judged) -> dict[str, Any]:
    return {
        **_candidate(one.candidate),
        "attainment": one.attainment,
        "good_rate": one.score,
        "ttft_p50": one.mean("ttft"),
        "itl_p50": one.mean("itl"),
        "runs": len(one.trials),
        "requests": one.requests,
        "attainment_late": one.mean("late"),
        "growing": one.growing,
    }
