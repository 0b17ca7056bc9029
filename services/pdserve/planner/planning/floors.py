"""What no load makes faster: the latencies of a request that is alone, for each kind of candidate. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.report.words import number
from pdserve.bench.slo import Slo
from pdserve.planner.planning.candidates import Candidate, Kind
from pdserve.planner.planning.trial import Question, lone
from pdserve.rpc.errors import ConfigError

_TIGHT = 0.8
"""Share of an SLO that a request takes when it is alone, above which more engines hardly help."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one kind; seconds."""

    kind: Kind
    ttft: float
    itl: float
    """The figure that the SLO is of; alone, all gaps are alike, so that this is TPOT too."""
    e2e: float

    def misses(self, slo: Slo) -> list[str]:
        """What not even a lone request meets, in words."""
        return [
            f"a {name} SLO of {number(most * 1000)} ms is below the {value * 1000:.0f} ms of a request that is alone"
            for name, most, value in self._beside(slo)
            if value > most
        ]

    def tight(self, slo: Slo) -> list[str]:
        """What a lone request meets with hardly any room, in words: there it is not engines that are missing."""
        return [
            f"a {name} SLO of {number(most * 1000)} ms leaves little above the {value * 1000:.0f} ms of a request "
            "that is alone"
            for name, most, value in self._beside(slo)
            if value > _TIGHT * most
        ]

    def _beside(self, slo: Slo) -> list[tuple[str, float, float]]:
        """Each objective that there is: its name, the SLO and what a lone request takes, seconds."""
        itl = {"p99": "P99 ITL", "mean": "mean ITL", "max": "longest ITL"}[slo.itl_of]
        figures = (
            ("TTFT", slo.ttft, self.ttft),
            (itl, slo.itl, self.itl),
            ("TPOT", slo.tpot, self.itl),
            ("E2E", slo.e2e, self.e2e),
        )
        return [(name, most, value) for name, most, value in figures if most is not None]


def floors(question: Question, candidates: Sequence[Candidate]) -> dict[Kind, Floor]:
    """By kind: all splits of one mode and profile have the same."""
    found = {}
    for candidate in candidates:
        if candidate.kind not in found:
            served = lone(question, candidate.fleet(question.profile))
            itl = served.itl(question.slo.itl_of) or 0.0
            found[candidate.kind] = Floor(candidate.kind, served.ttft, itl, served.e2e)
    return found


def check(slo: Slo, found: dict[Kind, Floor]) -> dict[Kind, list[str]]:
    """What each kind misses with a lone request already; empty lists where an SLO can be met.

    Raises:
        ConfigError: no kind can meet the SLO.
    """
    missed = {kind: floor.misses(slo) for kind, floor in found.items()}
    if all(missed.values()):
        said = "; ".join(f"{kind.words}: {', '.join(words)}" for kind, words in missed.items())
        raise ConfigError(f"no engine of this profile can meet the SLO, whatever the load: {said}")
    return missed
