"""A plan in words and as a table. Pure."""

from pdserve.bench.goodput import THRESHOLD
from pdserve.bench.slo import Slo
from pdserve.planner.plain import number, seconds
from pdserve.planner.planning.candidates import Candidate, takes
from pdserve.planner.planning.decision import Plan
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.length import NEARLY, SPANS
from pdserve.planner.planning.screening import EQUAL
from pdserve.planner.planning.switches import Switch
from pdserve.planner.planning.trial import Judged
from pdserve.planner.planning.verdict import answer, lighter, load, rate, ratio, reasons
from pdserve.planner.planning.workload import Workload

_FALLS = 0.05
"""Attainment that a run's last third is below all of it by to be told."""
_COLUMNS = (
    "way",
    "attainment",
    "95 % of runs",
    "good req/s",
    "TTFT p50",
    "ITL p50",
    "missed TTFT",
    "missed ITL",
    "runs",
    "requests",
)


_OF_SLO = ("attainment", "95 % of runs", "missed TTFT", "missed ITL")
"""Columns that say nothing where there is none."""


def report(plan: Plan) -> str:
    """All of it, in paragraphs of one sentence or a few."""
    parts = [question(plan), *lighter(plan), answer(plan), *reasons(plan), _aligned(plan)]
    parts += [*_goodput(plan), *_binding(plan), *_switches(plan), *_cost(plan), how(plan)]
    return "\n".join(part for part in parts if part)


def question(plan: Plan) -> str:
    """What was asked."""
    where = f"profile {plan.question.profile.name}{_idle(plan)}"
    return f"{plan.budget} ({where}): {workload(plan.asked)}; {objectives(plan.question.slo)}."


def _idle(plan: Plan) -> str:
    """How many accelerators the chosen way leaves idle; empty where none."""
    if not plan.idle:
        return ""
    verb = "is" if plan.idle == 1 else "are"
    return f"; {plan.idle} of them {verb} idle, {takes(plan.question.profile)}"


def workload(of: Workload) -> str:
    """Such as `2000 tokens in, 1000 out, 8 req/s`."""
    if of.trace is not None:
        typical = of.typical
        lengths = (
            f"a trace of {len(of.trace.jobs)} requests, in the mean {typical.prompt} tokens in, {typical.output} out"
        )
    else:
        lengths = f"{of.prompt} tokens in, {of.output} out"
    hits = f", {of.hit_rate:.0%} of the prompts cached" if of.hit_rate else ""
    return f"{lengths}{hits}, {load(of)}"


def objectives(slo: Slo) -> str:
    """Such as `TTFT within 1 s, P99 ITL within 50 ms`."""
    names = {"p99": "P99 ITL", "mean": "mean ITL", "max": "longest ITL"}
    pairs = (("TTFT", slo.ttft), (names[slo.itl_of], slo.itl), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    said = [f"{name} within {seconds(value)}" for name, value in pairs if value is not None]
    return ", ".join(said) or "no SLO: most requests a second"


def table(plan: Plan) -> list[tuple[str, ...]]:
    """The names of the columns, and every way that was run, best first; without an SLO nothing of objectives."""
    known = {plan.best.candidate: plan.attainment}
    if plan.opponent is not None and plan.opponent_attainment is not None:
        known[plan.opponent.candidate] = plan.opponent_attainment
    rows = [_COLUMNS, *(_row(one, known) for one in plan.screened.all)]
    if not plan.question.slo.empty:
        return rows
    kept = [place for place, name in enumerate(_COLUMNS) if name not in _OF_SLO]
    names, *ways = [tuple(row[place] for place in kept) for row in rows]
    return [tuple(name.removeprefix("good ") for name in names), *ways]


def _row(one: Judged, known: dict[Candidate, Interval]) -> tuple[str, ...]:
    interval = known.get(one.candidate)
    return (
        one.candidate.label,
        f"{one.attainment:.1%}",
        f"{interval.low:.0%}-{interval.high:.0%}" if interval else "",
        number(one.score),
        seconds(one.mean("ttft")),
        seconds(one.mean("itl")),
        f"{one.missed('ttft'):.0%}",
        f"{one.missed('itl'):.0%}",
        str(len(one.trials)),
        str(one.requests),
    )


def _aligned(plan: Plan) -> str:
    lines = table(plan)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    made = []
    for line in lines:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        made.append("  " + "  ".join(cells).rstrip())
    made.insert(1, "  " + "  ".join("-" * width for width in widths))
    return "\n" + "\n".join(made) + "\n"


def _goodput(plan: Plan) -> list[str]:
    found = [(plan.best, plan.sought), (plan.opponent, plan.opponent_sought)]
    said = [_rate(one.candidate, value) for one, value in found if one is not None and value is not None]
    if not said:
        return []
    return [f"Goodput ({THRESHOLD:.0%} attainment): {'; '.join(said)}.{ratio(plan)}"]


def _rate(candidate: Candidate, found: Goodput) -> str:
    value = found.value
    if value is None:
        return f"{candidate.label} not found, {found.why}"
    return f"{candidate.label} {rate(value)}"


def _binding(plan: Plan) -> list[str]:
    found = plan.binding
    if found is None:
        return []
    where = f"at {number(found.rate)} req/s" if found.rate is not None else "at this load"
    if found.machine is None and found.objective is None:
        return [f"Binds: nothing alone; a quarter more of any one thing brings less than 2 % {where}."]
    said = []
    if found.machine is not None:
        more = f"{found.gains[found.machine]:+.0%} {'' if plan.question.slo.empty else 'good '}requests"
        said.append(f"{found.machine} (a quarter more of it: {more} {where})")
    if found.objective is not None:
        said.append(f"of the objectives {found.objective} (a quarter looser: {found.gains[found.objective]:+.0%})")
    return [f"Binds: {'; '.join(said)}."]


def _switches(plan: Plan) -> list[str]:
    if not plan.switches:
        return []
    lines = [f"Would change the answer, one figure alone ({plan.best.candidate.shape} now):"]
    return lines + [f"  - {switch_words(switch)}" for switch in plan.switches]


def switch_words(switch: Switch) -> str:
    """Such as `rate above 6.1 to 6.4 req/s (now 4): 2P:2D`."""
    way = "above" if switch.other > switch.now else "below"
    unit = f" {switch.unit}" if switch.unit else ""
    to = "not half of the requests are good in any way" if switch.to is None else _named(switch.to)
    return (
        f"{switch.what} {way} {number(switch.still)} to {number(switch.other)}{unit} (now {number(switch.now)}): {to}"
    )


def _named(candidate: Candidate) -> str:
    return candidate.shape if not candidate.colocated else f"do not split, {candidate.shape}"


def _cost(plan: Plan) -> list[str]:
    if plan.cost is None:
        return []
    if plan.cost.good is None:
        return ["Cost: no request is good, so that no token is."]
    return [
        f"Cost of a million tokens{'' if plan.question.slo.empty else ' of good requests'}: "
        f"{number(plan.cost.good)} over prompts and answers, {number(plan.cost.good_output or 0.0)} over answers alone."
    ]


def how(plan: Plan) -> str:
    """How the figures came about."""
    of = plan.screened
    last = of.seed + len(plan.best.trials) - 1
    return (
        f"Simulated: runs of {of.count} requests, seeds {of.seed} to {last}; in brackets, where one more run of "
        f"{of.count} requests falls with 95 %. Ways within {EQUAL:.0%} are equal; of equal ones colocated is taken."
        f"{_length(plan)}"
    )


def _length(plan: Plan) -> str:
    """What is to be known of the runs' length; empty where they are long enough and steady."""
    best, workload = plan.best, plan.question.workload
    if workload.rate is None:
        return ""
    answers = best.requests / workload.rate / best.mean("e2e")
    if answers < SPANS / NEARLY:
        return (
            f" A run lasts {answers:.1f} answers (less than {SPANS}): such a run flatters, at a load that lasts fewer "
            "requests are good."
        )
    if best.growing or best.attainment - best.mean("late") > _FALLS:
        return (
            f" Of the last third of a run's requests {best.mean('late'):.0%} are good: it is not steady, and a longer "
            "one has fewer."
        )
    return ""
