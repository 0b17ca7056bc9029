"""What the engines that run now attain at the load that comes now. Pure, seeded."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.goodputs import Goodput, goodput
from pdserve.planner.planning.interval import Interval, predict_share
from pdserve.planner.planning.trial import Judged, Question, judged
from pdserve.planner.simulator import Mode
from pdserve.rpc.errors import ConfigError

_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Present:
    """A layout and how good it is."""

    layout: Candidate
    judged: Judged | None
    """At the load that was asked for; None: it cannot be judged."""
    attainment: Interval | None
    """For one more run."""
    sought: Goodput | None
    """None: not looked for."""
    why: str = ""
    """Why it cannot be judged, in words."""


def layout(engines: Mapping[str, int], modes: Mapping[str, float], profile: str = "") -> Candidate | None:
    """Of the ready engines by role, as `metrics.Reading` has them, and of the requests by the mode of their hand-over.

    A pair hands over in the mode that most requests had; READ, the proxy's own choice, where none had any. None:
    nothing that could serve. `profile`: whose engines they are taken for, as `Candidate.profile`.
    """
    prefills, decodes, whole = (engines.get(role, 0) for role in ("prefill", "decode", "both"))
    if prefills and decodes:
        mode = Mode.WRITE if modes.get("write", 0.0) > modes.get("read", 0.0) else Mode.READ
        return Candidate(mode, prefills, decodes, whole, profile)
    return Candidate(Mode.COLOCATED, engines=whole, profile=profile) if whole else None


def judge_present(
    question: Question, of: Candidate, count: int, seed: int, requests: int | None, *, with_goodput: bool
) -> Present:
    """Runs of `count` requests. `requests`: as `goodput` takes it."""
    try:
        found = judged(question, of, count, range(seed, seed + _SEEDS))
    except ConfigError as error:
        return Present(of, None, None, None, error.message)
    sought = goodput(question, of, seed, requests) if with_goodput else None
    return Present(of, found, predict_share([trial.attainment for trial in found.trials], count), sought)
