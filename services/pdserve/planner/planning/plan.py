"""A plan: what was asked, the way to take, and all that was found out of it. Values only; `decision` makes it."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.bench.goodput import THRESHOLD
from pdserve.planner.planning.binding import Binding
from pdserve.planner.planning.candidates import Budget, Candidate, Kind
from pdserve.planner.planning.cost import Cost
from pdserve.planner.planning.floors import Floor
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval
from pdserve.planner.planning.present import Present
from pdserve.planner.planning.screening import Screened
from pdserve.planner.planning.switches import Searched
from pdserve.planner.planning.trial import Judged, Question
from pdserve.planner.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    question: Question
    """At the load that was planned for."""
    asked: Workload
    """What was asked for; more than `question` has where no way holds half of that."""
    budget: Budget
    floors: Mapping[Kind, Floor]
    """A lone request, by kind."""
    impossible: Mapping[Kind, list[str]]
    """Why a kind was not looked at: what a lone request misses in it."""
    screened: Screened
    attainment: Interval
    """Of the chosen way, for one more run."""
    score: Interval
    """Good requests a second of it."""
    opponent_attainment: Interval | None
    """Of the best of the other kind."""
    goodputs: Mapping[Candidate, Goodput]
    """Of the best few ways, the most first, or why it was not found; empty: not looked for."""
    binding: Binding | None
    searched: Searched | None
    """What would change the answer; None: not looked for."""
    cost: Cost | None
    present: Present | None
    """What runs now; None: not asked for."""

    @property
    def best(self) -> Judged:
        """The chosen way."""
        return self.screened.best

    @property
    def opponent(self) -> Judged | None:
        """The best of the other kind, colocated or split."""
        return self.screened.opponent

    @property
    def sought(self) -> Goodput | None:
        """Of the chosen way; None: not looked for."""
        return self.goodputs.get(self.best.candidate)

    @property
    def opponent_sought(self) -> Goodput | None:
        """Of the best of the other kind."""
        return None if self.opponent is None else self.goodputs.get(self.opponent.candidate)

    @property
    def held(self) -> bool:
        """Whether as many requests are good as goodput asks for."""
        return self.attainment.mean >= THRESHOLD

    @property
    def lacks(self) -> str:
        """The kind of engines that the profile has no costs of, so that no split can be compared; empty: none."""
        family = self.question.profile.family
        if all(profile.colocated is None for profile in family):
            return "colocated engines"
        return "prefill and decode engines" if all(profile.prefill is None for profile in family) else ""

    @property
    def idle(self) -> int:
        """Accelerators that the chosen way leaves idle; 0 where engines were given."""
        if self.budget.gpus is None:
            return 0
        return self.budget.gpus - self.best.candidate.accelerators(self.question.profile)

    @property
    def goodput(self) -> Interval | None:
        """Of the chosen way; None: not looked for, or not found."""
        return self.sought.value if self.sought is not None else None

    @property
    def opponent_goodput(self) -> Interval | None:
        """Of the best of the other kind."""
        return self.opponent_sought.value if self.opponent_sought is not None else None
