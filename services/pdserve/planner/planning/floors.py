"""What no load makes faster: the latencies of a request that is alone, for each kind of candidate. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.trial import Question, lone
from pdserve.planner.simulator import Mode
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one mode; seconds."""

    mode: Mode
    ttft: float
    itl: float
    """The figure that the SLO is of; alone, all gaps are alike, so that this is TPOT too."""
    e2e: float

    def misses(self, slo: Slo) -> list[str]:
        """What not even a lone request meets, in words."""
        itl = {"p99": "P99 ITL", "mean": "mean ITL", "max": "longest ITL"}[slo.itl_of]
        pairs = (
            ("TTFT", slo.ttft, self.ttft),
            (itl, slo.itl, self.itl),
            ("TPOT", slo.tpot, self.itl),
            ("E2E", slo.e2e, self.e2e),
        )
        return [
            f"a {name} SLO of {most * 1000:.0f} ms is below the {value * 1000:.0f} ms of a request that is alone"
            for name, most, value in pairs
            if most is not None and value > most
        ]


def floors(question: Question, candidates: Sequence[Candidate]) -> dict[Mode, Floor]:
    """By mode: all splits of one mode have the same."""
    found = {}
    for candidate in candidates:
        if candidate.mode not in found:
            served = lone(question, candidate.fleet(question.profile))
            itl = served.itl(question.slo.itl_of) or 0.0
            found[candidate.mode] = Floor(candidate.mode, served.ttft, itl, served.e2e)
    return found


def check(slo: Slo, found: dict[Mode, Floor]) -> dict[Mode, list[str]]:
    """What each mode misses with a lone request already; empty lists where an SLO can be met.

    Raises:
        ConfigError: no mode can meet the SLO.
    """
    missed = {mode: floor.misses(slo) for mode, floor in found.items()}
    if all(missed.values()):
        said = "; ".join(f"{mode.name}: {', '.join(words)}" for mode, words in missed.items())
        raise ConfigError(f"no engine of this profile can meet the SLO, whatever the load: {said}")
    return missed
