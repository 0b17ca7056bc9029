"""What tokens of good requests cost, where an engine's price is known. Pure."""

from dataclasses import dataclass

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.trial import Judged, Question
from pdserve.planner.profile import Profile


@dataclass(frozen=True, slots=True)
class Cost:
    """Per million tokens, in the currency that was given."""

    good: float | None
    """Prompt and answer tokens of requests that met every objective; None: there were none."""
    good_output: float | None
    """Their answers' tokens alone."""


def cost(question: Question, best: Judged, per_hour: float) -> Cost:
    """At the load that was planned for. `per_hour`: of an engine of the first profile, where there are several."""
    typical = question.workload.typical
    a_second = per_hour * _sized(question.profile, best.candidate) / 3600

    def million(tokens: int) -> float | None:
        return a_second / (best.score * tokens) * 1e6 if best.score > 0 else None

    return Cost(million(typical.prompt + typical.output), million(typical.output))


def _sized(profile: Profile, of: Candidate) -> float:
    """Engines of it; beside other profiles as many of the first profile's size as have its accelerators."""
    if not profile.siblings:
        return of.total
    return of.accelerators(profile) / max(role.accelerators for role in profile.roles.values())
