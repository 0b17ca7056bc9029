"""A plan's verdict in words: which way to take, whether the load is held there, and why. Pure."""

from pdserve.bench.goodput import THRESHOLD
from pdserve.bench.report.words import number, seconds
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.screening import EQUAL, HELD
from pdserve.planner.planning.trial import Judged
from pdserve.planner.planning.workload import Workload


def answer(plan: Plan) -> str:
    """The way to take, and how good it is. Where the profile lacks a kind of engine it says that it cannot compare."""
    best = plan.best.candidate
    way = best.shape if best.colocated else f"{best.shape}, {best.mode.name}"
    if plan.lacks:
        rest = f"The best {'without a split' if best.colocated else 'split'} that it can tell of: {way}"
        return (
            f"-> Profile {plan.question.profile.name} cannot say whether to split: it has no costs of {plan.lacks}. "
            f"{rest}. {_how_good(plan)}"
        )
    return f"-> {'Do not split:' if best.colocated else 'Split'} {way}. {_how_good(plan)}"


def _how_good(plan: Plan) -> str:
    where = f"at {load(plan.question.workload)}"
    if plan.question.slo.empty:
        return f"{rate(plan.score)} {where}."
    return f"{percent(plan.attainment)} of the requests meet every objective {where}{_overload(plan)}."


def _overload(plan: Plan) -> str:
    """What is wrong with the load where fewer are good than goodput asks for; empty where enough are."""
    if plan.held:
        return ""
    less = f", fewer than {THRESHOLD:.0%}"
    now = plan.question.workload.rate
    if now is None:
        return f"{less}: too many are in flight"
    if plan.goodput is not None and plan.goodput.mean < now:
        return f"{less}: the load is above the goodput of {number(plan.goodput.mean)} req/s"
    if plan.goodput is not None:
        return f"{less}: the load is as high as the goodput, about {number(plan.goodput.mean)} req/s"
    why = f"not found: {plan.sought.why}" if plan.sought is not None else "not looked for"
    return f"{less}: the load is above the goodput ({why})"


def reasons(plan: Plan) -> list[str]:
    """Why, where there is something to say."""
    best, opponent = plan.best, plan.opponent
    said = [f"   A{kind.words[1:]} is out: {'; '.join(words)}." for kind, words in plan.impossible.items()]
    if opponent is None:
        if best.candidate.colocated and not plan.impossible and not plan.lacks:
            said.append("   A split takes two engines at least.")
        return said
    if not best.candidate.colocated:
        why = _worst(opponent)
        return [*said, f"   {opponent.candidate.shape} come to {_of_opponent(plan, opponent)}{why}."]
    if _as_good(plan, opponent):
        said.append(
            f"   At this load colocated engines do as well as the best split, {opponent.candidate.label} "
            f"({_of_opponent(plan, opponent)}): a split would only add a hand-over."
        )
    else:
        said.append(f"   The best split, {opponent.candidate.label}, comes to {_of_opponent(plan, opponent)}.")
    if opponent.mean("ttft") > best.mean("ttft"):
        said.append(
            f"   A split has the later first token: {seconds(opponent.mean('ttft'))} in the median, against "
            f"{seconds(best.mean('ttft'))}."
        )
    if plan.question.workload.typical.output <= 64:
        said.append("   Answers are short: there is little decoding for prompts to disturb.")
    return said


def _as_good(plan: Plan, opponent: Judged) -> bool:
    """Whether colocated engines, which were chosen, and the best split both do what is asked."""
    if plan.question.slo.empty:
        return abs(opponent.score - plan.best.score) <= EQUAL * plan.best.score
    return plan.held and opponent.attainment - plan.best.attainment <= EQUAL


def _of_opponent(plan: Plan, opponent: Judged) -> str:
    if plan.question.slo.empty:
        return f"{number(opponent.score)} req/s"
    return percent(plan.opponent_attainment)


def _worst(one: Judged) -> str:
    names = {"ttft": "the TTFT SLO", "itl": "the ITL SLO", "tpot": "the TPOT SLO", "e2e": "the E2E SLO"}
    name = max(names, key=one.missed)
    share = one.missed(name)
    return f": {share:.0%} miss {names[name]}" if share else ""


def lighter(plan: Plan) -> list[str]:
    """That another load than the one asked for is planned for, and why that one is too much."""
    if plan.asked == plan.question.workload:
        return []
    floor = plan.floors[plan.best.candidate.kind]
    if tight := floor.tight(plan.question.slo):
        why = "; ".join(tight)
    else:
        why = "too few engines" + (" for the ways that the SLO leaves" if plan.impossible else "")
    return [
        f"   At {load(plan.asked)} not even {HELD:.0%} of the requests are good, whatever is chosen: {why}. "
        f"Planned for {load(plan.question.workload)} instead."
    ]


def ratio(plan: Plan) -> str:
    """Which kind has the larger goodput, and how many times the other's; empty where one is not known."""
    mine, other = plan.goodput, plan.opponent_goodput
    if mine is None or other is None:
        return ""
    times = max(mine.mean, other.mean) / min(mine.mean, other.mean)
    if times < 1.05:
        return " Both hold about as much."
    colocated = plan.best.candidate.colocated is (mine.mean > other.mean)
    holder = "Colocated engines hold" if colocated else "The split holds"
    return f" {holder} {number(float(f'{times:.2g}'))} times as many requests."


def percent(of: Interval | None) -> str:
    """A share and where one more run would be."""
    return "unknown" if of is None else f"{of.mean:.0%} ({of.low:.0%} to {of.high:.0%})"


def rate(of: Interval) -> str:
    """Requests a second and where one more run would be."""
    return f"{number(of.mean)} req/s ({number(of.low)} to {number(of.high)})"


def load(of: Workload) -> str:
    """Such as `8 req/s` or `8 in flight`."""
    return f"{number(of.rate)} req/s" if of.rate is not None else f"{of.concurrency} in flight"
