"""A plan as a JSON document. Pure. Seconds, tokens, requests a second; shares from 0 to 1."""

from dataclasses import asdict
from typing import Any

from pdserve.planner.planning import check, words
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.present import Present
from pdserve.planner.planning.switches import Searched
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
        "profiles": [profile.name for profile in plan.question.profile.family],
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
        "impossible": {kind.key: said for kind, said in plan.impossible.items()},
        "floors": {
            kind.key: {"ttft": floor.ttft, "itl": floor.itl, "e2e": floor.e2e} for kind, floor in plan.floors.items()
        },
        "goodputs": [
            {**_candidate(way), "goodput": _interval(found.value), "goodput_not_found": _why(found)}
            for way, found in plan.goodputs.items()
        ],
        "present": _present(plan.present),
        "ways": [_judged(one) for one in plan.screened.all],
        "binding": None
        if plan.binding is None
        else {
            "rate": plan.binding.rate,
            "machine": plan.binding.machine,
            "objective": plan.binding.objective,
            "gains": dict(plan.binding.gains),
        },
        **_changes(plan.searched),
        "cost_per_million_tokens": None if plan.cost is None else asdict(plan.cost),
        "runs": {"requests": plan.screened.count, "seed": plan.screened.seed, "simulated": plan.screened.runs},
        "check": check.command(plan),
        "words": words.report(plan),
    }


def _present(of: Present | None) -> dict[str, Any] | None:
    if of is None:
        return None
    return {
        **_candidate(of.layout),
        "attainment": _interval(of.attainment),
        "goodput": None if of.sought is None else _interval(of.sought.value),
        "goodput_not_found": _why(of.sought),
        "not_judged": of.why or None,
    }


def _changes(of: Searched | None) -> dict[str, Any]:
    """What would change the answer; null where it was not looked for. Of what changes nothing: how far was looked."""
    if of is None:
        return {"switches": None, "unchanged": None}
    return {
        "switches": [{**asdict(one), "to": None if one.to is None else _candidate(one.to)} for one in of.switches],
        "unchanged": [asdict(one) for one in of.quiet],
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
        "profile": of.profile or None,
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
