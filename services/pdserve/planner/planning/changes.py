"""In words: what would change a plan's answer, and how far it was looked for. Pure."""

from pdserve.bench.report.words import number
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.switches import Quiet, Searched, Switch


def changes(found: Searched, best: Candidate) -> tuple[str, tuple[str, ...]]:
    """A sentence, and a list of the changes; in the sentence, or last in the list, where nothing changes it."""
    nothing = "; ".join(_quiet(one) for one in found.quiet)
    if not found.switches:
        return f"Nothing looked at changes the answer ({best.shape}), one figure alone: {nothing}.", ()
    items = [switch_words(one) for one in found.switches]
    if nothing:
        items.append(f"nothing else within {nothing}")
    return f"Would change the answer, one figure alone ({best.shape} now):", tuple(items)


def switch_words(switch: Switch) -> str:
    """Such as `rate above 6.1 to 6.4 req/s (now 4): 2P:2D`."""
    way = "above" if switch.other > switch.now else "below"
    to = "not half of the requests are good in any way" if switch.to is None else _named(switch.to)
    return (
        f"{switch.what} {way} {number(switch.still)} to {number(switch.other)}{_unit(switch.unit)} "
        f"(now {number(switch.now)}): {to}"
    )


def _quiet(of: Quiet) -> str:
    """How far it was looked for, such as `TTFT SLO up to 64 s`."""
    if of.low is not None and of.high is not None:
        where = f"{number(of.low)} to {number(of.high)}"
    elif of.high is not None:
        where = f"up to {number(of.high)}"
    else:
        where = f"down to {number(of.low or 0.0)}"
    return f"{of.what} {where}{_unit(of.unit)}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _named(candidate: Candidate) -> str:
    return candidate.shape if not candidate.colocated else f"do not split, {candidate.shape}"
