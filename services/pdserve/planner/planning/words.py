"""A plan in words and as a table. Pure."""

from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.decision import Plan
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.length import NEARLY, SPANS
from pdserve.planner.planning.screening import EQUAL, HELD
from pdserve.planner.planning.switches import Switch
from pdserve.planner.planning.trial import Judged
from pdserve.planner.planning.workload import Workload
from pdserve.planner.simulator import Mode

_GOOD = 0.9
_FALLS = 0.05
"""Attainment that a run's last third is below all of it by to be told."""
COLUMNS = (
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


def report(plan: Plan) -> str:
    """All of it, in paragraphs of one sentence or a few."""
    parts = [question(plan), *_lighter(plan), answer(plan), *reasons(plan), _aligned(plan)]
    parts += [*_goodput(plan), *_binding(plan), *_switches(plan), *_cost(plan), how(plan)]
    return "\n".join(part for part in parts if part)


def question(plan: Plan) -> str:
    """What was asked."""
    where = f"profile {plan.question.profile.name}"
    return f"{plan.budget} ({where}): {workload(plan.asked)}; {objectives(plan.question.slo)}."


def workload(of: Workload) -> str:
    """Such as `2000 tokens in, 1000 out, 8 req/s`."""
    rate = f"{of.rate:.3g} req/s" if of.rate is not None else f"{of.concurrency} in flight"
    if of.trace is not None:
        typical = of.typical
        lengths = (
            f"a trace of {len(of.trace.jobs)} requests, in the mean {typical.prompt} tokens in, {typical.output} out"
        )
    else:
        lengths = f"{of.prompt} tokens in, {of.output} out"
    hits = f", {of.hit_rate:.0%} of the prompts cached" if of.hit_rate else ""
    return f"{lengths}{hits}, {rate}"


def objectives(slo: Slo) -> str:
    """Such as `TTFT within 1 s, P99 ITL within 50 ms`."""
    names = {"p99": "P99 ITL", "mean": "mean ITL", "max": "longest ITL"}
    pairs = (("TTFT", slo.ttft), (names[slo.itl_of], slo.itl), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    said = [f"{name} within {seconds(value)}" for name, value in pairs if value is not None]
    return ", ".join(said) or "no SLO: most requests a second"


def answer(plan: Plan) -> str:
    """The way to take, in one sentence."""
    best = plan.best.candidate
    where = f"at {_load(plan.question.workload)}"
    share = f"{percent(plan.attainment)} of the requests meet every objective {where}"
    if best.colocated:
        return f"-> Do not split: {best.shape}. {share}."
    return f"-> Split {best.shape}, {best.mode.name}. {share}."


def reasons(plan: Plan) -> list[str]:
    """Why, where there is something to say."""
    best, opponent = plan.best, plan.opponent
    said = []
    for mode, words in plan.impossible.items():
        name = "A colocated engine" if mode is Mode.COLOCATED else f"A split in {mode.name}"
        said.append(f"   {name} is out: {'; '.join(words)}.")
    if opponent is None:
        return said
    if best.candidate.colocated:
        if plan.attainment.mean >= _GOOD and opponent.attainment - best.attainment <= EQUAL:
            said.append(
                f"   At this load colocated engines do as well as the best split, {opponent.candidate.label} "
                f"({percent(plan.opponent_attainment)}): a split would only add a hand-over."
            )
        else:
            said.append(f"   The best split, {opponent.candidate.label}, comes to {percent(plan.opponent_attainment)}.")
        if opponent.mean("ttft") > best.mean("ttft"):
            said.append(
                f"   A split has the later first token: {seconds(opponent.mean('ttft'))} in the median, against "
                f"{seconds(best.mean('ttft'))}."
            )
        if plan.question.workload.typical.output <= 64:
            said.append("   Answers are short: there is little decoding for prompts to disturb.")
    else:
        why = _worst(opponent)
        said.append(f"   {opponent.candidate.shape.capitalize()} come to {percent(plan.opponent_attainment)}{why}.")
    return said


def seconds(value: float) -> str:
    """Of three digits, in ms below 1 s."""
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def percent(of: Interval | None) -> str:
    """A share and where one more run would be."""
    return "unknown" if of is None else f"{of.mean:.0%} ({of.low:.0%} to {of.high:.0%})"


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """The table: every way that was run, best first."""
    known = {plan.best.candidate: plan.attainment}
    if plan.opponent is not None and plan.opponent_attainment is not None:
        known[plan.opponent.candidate] = plan.opponent_attainment
    return [_row(one, known) for one in plan.screened.all]


def _row(one: Judged, known: dict[Candidate, Interval]) -> tuple[str, ...]:
    interval = known.get(one.candidate)
    return (
        one.candidate.label,
        f"{one.attainment:.1%}",
        f"{interval.low:.0%}-{interval.high:.0%}" if interval else "",
        f"{one.score:.3g}",
        seconds(one.mean("ttft")),
        seconds(one.mean("itl")),
        f"{one.missed('ttft'):.0%}",
        f"{one.missed('itl'):.0%}",
        str(len(one.trials)),
        str(one.requests),
    )


def _aligned(plan: Plan) -> str:
    lines = [COLUMNS, *rows(plan)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    made = []
    for line in lines:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        made.append("  " + "  ".join(cells).rstrip())
    made.insert(1, "  " + "  ".join("-" * width for width in widths))
    return "\n" + "\n".join(made) + "\n"


def _worst(one: Judged) -> str:
    names = {"ttft": "the TTFT SLO", "itl": "the ITL SLO", "tpot": "the TPOT SLO", "e2e": "the E2E SLO"}
    name = max(names, key=one.missed)
    share = one.missed(name)
    return f": {share:.0%} miss {names[name]}" if share else ""


def _load(of: Workload) -> str:
    return f"{of.rate:.3g} req/s" if of.rate is not None else f"{of.concurrency} in flight"


def _lighter(plan: Plan) -> list[str]:
    if plan.asked == plan.question.workload:
        return []
    return [
        f"   At {_load(plan.asked)} not even {HELD:.0%} of the requests are good, whatever is chosen: too few engines. "
        f"Planned for {_load(plan.question.workload)} instead."
    ]


def _goodput(plan: Plan) -> list[str]:
    found = [(plan.best, plan.sought), (plan.opponent, plan.opponent_sought)]
    said = [_rate(one.candidate, value) for one, value in found if one is not None and value is not None]
    if not said:
        return []
    ratio = ""
    if plan.goodput is not None and plan.opponent_goodput is not None:
        ratio = f" Ratio of goodputs {plan.goodput.mean / plan.opponent_goodput.mean:.2g}."
    return [f"Goodput ({_GOOD:.0%} attainment): {'; '.join(said)}.{ratio}"]


def _rate(candidate: Candidate, found: Goodput) -> str:
    value = found.value
    if value is None:
        return f"{candidate.label} not found, {found.why}"
    return f"{candidate.label} {value.mean:.3g} req/s ({value.low:.3g} to {value.high:.3g})"


def _binding(plan: Plan) -> list[str]:
    found = plan.binding
    if found is None:
        return []
    where = f"at {found.rate:.3g} req/s" if found.rate is not None else "at this load"
    if found.machine is None and found.objective is None:
        return [f"Binds: nothing alone; a quarter more of any one thing brings less than 2 % {where}."]
    said = []
    if found.machine is not None:
        said.append(f"{found.machine} (a quarter more of it: {found.gains[found.machine]:+.0%} good requests {where})")
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
    return f"{switch.what} {way} {switch.still:.3g} to {switch.other:.3g}{unit} (now {switch.now:.3g}): {to}"


def _named(candidate: Candidate) -> str:
    return candidate.shape if not candidate.colocated else f"do not split, {candidate.shape}"


def _cost(plan: Plan) -> list[str]:
    if plan.cost is None:
        return []
    if plan.cost.good is None:
        return ["Cost: no request is good, so that no token is."]
    return [
        f"Cost of a million tokens of good requests: {plan.cost.good:.3g} over prompts and answers, "
        f"{plan.cost.good_output:.3g} over answers alone."
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
