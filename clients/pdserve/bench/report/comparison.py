"""What was measured, in words, and what makes a comparison of several files unfair. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.bench.report import words
from pdserve.bench.report.entries import Entry
from pdserve.bench.words import uncertain


def goodput_words(entry: Entry) -> str:
    """The goodput with its uncertainty, in words."""
    return uncertain(entry.goodput) if entry.goodput is not None else "not searched"


def facts(entry: Entry) -> dict[str, str]:
    """What was measured, by name, in words; an unknown fact is left out."""
    results = entry.results
    target, machine, load = results.target, results.machine, results.workload
    # Content is new in every measurement, so that no cache knows it: that makes no other workload.
    lengths = {name: value for name, value in load.lengths.items() if name != CONTENT_SEED}
    said = {
        "target": f"{target.address} ({'gRPC' if target.api == 'grpc' else 'HTTP'})",
        "model": target.model,
        "hand-over": target.mode.upper() if target.mode else "none reported",
        "transport": target.transport,
        "engines": ", ".join(
            f"{sum(engine.role == role for engine in target.engines)} x {role}"
            for role in dict.fromkeys(engine.role for engine in target.engines)
        ),
        "workload": f"{load.scenario}: {_said(lengths)}" if load.scenario else _said(lengths),
        "arrivals": _said(load.arrivals),
        "requests a run": str(load.requests),
        "seed": str(load.seed),
        "content seed": str(load.lengths.get(CONTENT_SEED, "")),
        "SLO": slo_words(entry),
        "machine": f"{machine.cpu}, {words.count(machine.cores, 'core')}, {words.plain(machine.memory_gib)} GiB, "
        f"{machine.system}",
        "measured": results.created.replace("T", " ").replace("Z", " UTC"),
    }
    return {name: value for name, value in said.items() if value}


def slo_words(entry: Entry) -> str:
    """The objectives in words."""
    slo = entry.slo
    said = [
        f"{name} ≤ {words.objective(value)}"
        for name, value in (
            ("TTFT", slo.ttft),
            (f"ITL ({slo.itl_of} of each request)", slo.itl),
            ("TPOT", slo.tpot),
            ("E2E", slo.e2e),
        )
        if value is not None
    ]
    return " and ".join(said) or "none: a request that succeeds is good"


CONTENT_SEED = "content_seed"
"""Member of a workload's lengths."""
UNFAIR = ("model", "workload", "arrivals", "requests a run", "seed", "SLO", "machine")
"""Facts that must be equal for two results to be compared."""


def differences(entries: Sequence[Entry]) -> list[str]:
    """Which of the facts that must be equal are not."""
    told = [facts(entry) for entry in entries]
    return [name for name in UNFAIR if len({fact.get(name, "") for fact in told}) > 1]


def _said(asked: Mapping[str, Any]) -> str:
    """A mapping out of the results in words: its kind, then the rest."""
    rest = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in asked.items() if name != "kind")
    kind = str(asked.get("kind", "")).replace("_", " ")
    return f"{kind} ({rest})" if kind and rest else kind or rest


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return words.plain(value)
    if isinstance(value, (list, tuple)):
        return " to ".join(_value(each) for each in value)
    return words.NONE if value is None else str(value)
