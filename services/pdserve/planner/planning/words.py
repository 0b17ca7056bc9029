"""A plan in words and as a table. Pure."""

import textwrap
from dataclasses import dataclass

from pdserve.bench.goodput import THRESHOLD
from pdserve.bench.report.words import joined, number, objective, seconds
from pdserve.bench.slo import Slo
from pdserve.bench.words import table as aligned
from pdserve.planner.planning import check
from pdserve.planner.planning.candidates import Candidate, takes
from pdserve.planner.planning.changes import changes
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.length import NEARLY, SPANS
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.screening import EQUAL
from pdserve.planner.planning.trial import Judged
from pdserve.planner.planning.verdict import answer, lighter, load, percent, rate, ratio, reasons
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


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A piece of a report."""

    text: str
    """One sentence or a few."""
    items: tuple[str, ...] = ()
    """A list below it."""
    code: str = ""
    """A command below it."""

    def __str__(self) -> str:
        return "\n".join((self.text, *(f"  - {item}" for item in self.items), *([f"  {self.code}"] * bool(self.code))))


def report(plan: Plan) -> str:
    """All of it."""
    names, *ways = table(plan)
    shown = textwrap.indent(aligned(names, ways), "  ")
    return "\n".join([*before(plan), f"\n{shown}\n", *map(str, after(plan))])


def before(plan: Plan) -> list[str]:
    """What was asked, the answer and why: above the table."""
    return [question(plan), *lighter(plan), answer(plan), *reasons(plan)]


def after(plan: Plan) -> list[Paragraph]:
    """What else there is to say: below the table."""
    said = [*_goodput(plan), *_present(plan), *_binding(plan)]
    found = [Paragraph(text) for text in said]
    if plan.searched is not None:
        found.append(Paragraph(*changes(plan.searched, plan.best.candidate)))
    found += [Paragraph(text) for text in _cost(plan)]
    found.append(Paragraph(f"To check it, with {check.engines(plan)} ready:", code=check.command(plan)))
    return [*found, Paragraph(how(plan))]


def question(plan: Plan) -> str:
    """What was asked."""
    names = [profile.name for profile in plan.question.profile.family]
    where = f"profile{'s' * (len(names) > 1)} {joined(names)}{_idle(plan)}"
    return f"{plan.budget} ({where}): {workload(plan.asked)}; {objectives(plan.question.slo)}."


def _idle(plan: Plan) -> str:
    """How many accelerators the chosen way leaves idle; empty where none."""
    if not plan.idle:
        return ""
    verb = "is" if plan.idle == 1 else "are"
    return f"; {plan.idle} of them {verb} idle, {takes(plan.question.profile.named(plan.best.candidate.profile))}"


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
    said = [f"{name} within {objective(value)}" for name, value in pairs if value is not None]
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


def _goodput(plan: Plan) -> list[str]:
    if not plan.goodputs:
        return []
    said = [_rate(way, found) for way, found in plan.goodputs.items()]
    return [f"Goodput ({THRESHOLD:.0%} attainment): {'; '.join(said)}.{ratio(plan)}"]


def _present(plan: Plan) -> list[str]:
    now = plan.present
    if now is None:
        return []
    if now.judged is None:
        return [f"Runs now: {now.layout.label}. It cannot be judged: {now.why}."]
    if plan.question.slo.empty:
        said = f"{number(now.judged.score)} req/s"
    else:
        said = f"{percent(now.attainment)} of the requests meet every objective at {load(plan.asked)}"
    if now.sought is not None:
        value = now.sought.value
        said += f", goodput {rate(value) if value is not None else f'not found, {now.sought.why}'}"
    return [f"Runs now: {now.layout.label}, {said}; {_beside(plan, now.layout, now.judged)}."]


def _beside(plan: Plan, layout: Candidate, runs: Judged) -> str:
    """How what runs now stands to the chosen way. It may be none of those that were weighed, and better than them."""
    best, planned = plan.best, plan.question.workload
    if layout == best.candidate:
        return "the best"
    if plan.asked != planned:  # the two were judged at different loads
        return f"{best.candidate.label} is the best at {load(planned)}"
    if runs.score - best.score > EQUAL * (planned.rate or best.score):
        return f"better than {best.candidate.label}, the best of the ways that were weighed"
    return f"{best.candidate.label} is better or as good"


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
        f"{of.count} requests falls with 95 %. Ways within {EQUAL:.0%} are equal: of those colocated is taken, "
        f"and of splits the one with the most {'goodput' if plan.goodputs else 'room'}."
        f"{_mixed(plan)}{_length(plan)}"
    )


def _mixed(plan: Plan) -> str:
    """What is assumed of splits that have engines of two profiles; empty where there are none."""
    mixed = {one.name for one in plan.question.profile.mixed}
    if not any(one.candidate.profile in mixed for one in plan.screened.all):
        return ""
    return (
        " What a hand-over between engines of two profiles costs, no profile says: of each figure the worse is taken."
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
