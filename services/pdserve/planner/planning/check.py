"""The command that measures what a plan says, with the same lengths, arrivals, load and objectives. Pure."""

import shlex

from pdserve.bench.report.words import count
from pdserve.planner.planning.plan import Plan


def command(plan: Plan) -> str:
    """`pdserve bench` for the chosen way at the planned load: one run, of the first seed."""
    best, slo, workload = plan.best.candidate, plan.question.slo, plan.question.workload
    said = ["pdserve", "bench"]
    said += ["--route", "colocated"] if best.colocated else ["--mode", best.mode.value]
    requests = plan.screened.count
    if workload.trace is not None:
        # A run of the bench is a trace once through at most.
        requests = min(requests, len(workload.trace.jobs))
        said += ["--trace", workload.trace.file or "FILE"]
    else:
        said += ["--input-len", str(workload.prompt), "--output-len", str(workload.output)]
        said += ["--hit-rate", _exact(workload.hit_rate)] if workload.hit_rate else []
        said += ["--burstiness", _exact(workload.burstiness)] if workload.burstiness != 1 else []
    if workload.rate is not None:
        said += ["--rate", _exact(workload.rate)]
    else:
        said += ["--concurrency", str(workload.concurrency)]
    said += ["--requests", str(requests)]
    said += ["--seed", str(plan.screened.seed)] if plan.screened.seed else []
    for name, most in (("ttft", slo.ttft), ("itl", slo.itl), ("tpot", slo.tpot), ("e2e", slo.e2e)):
        said += [f"--slo-{name}", _exact(most)] if most is not None else []
    said += ["--slo-itl-of", slo.itl_of] if slo.itl is not None and slo.itl_of != "p99" else []
    return shlex.join(said)


def engines(plan: Plan) -> str:
    """What has to run for that, in words."""
    best = plan.best.candidate
    if best.colocated:
        found = f"{count(best.engines, 'engine')} that serve{'s' if best.engines == 1 else ''} whole requests"
    else:
        found = f"{best.prefills} prefill and {count(best.decodes, 'decode engine')}"
    return f"{found} ({best.profile})" if best.profile else found


def _exact(value: float) -> str:
    return f"{value:.10g}"
