"""Whether another way would be better where one figure is another: of a changed question, by how far each way is ahead.
Pure, seeded.

What is said never contradicts the verdict. Whoever seems better at the given figures already, where the plan's longer
runs said otherwise, has to be ahead by more than he is there. At a load up to the highest goodput that was found there
is a way that holds; at one that the plan found too much there is none.

Only ways near the answer are looked at (`near`): the colocated ones, the split itself or the best one, its neighbours,
and the best split of each other profile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.planner.planning.axes import Axis
from pdserve.planner.planning.candidates import Candidate
from pdserve.planner.planning.screening import EQUAL, HELD
from pdserve.planner.planning.trial import Judged, Question


@dataclass(frozen=True, slots=True)
class Facts:
    """What the plan says, and this may not contradict."""

    best: Candidate
    held: float = 0.0
    """Up to this rate, requests a second, half of the requests and more are good."""
    too_much: float | None = None
    """From this rate on they are not, whatever is chosen; None: not known."""


Answer = tuple[bool, Candidate | None]
"""Whether another way is better, and which; None: not half of the requests are good."""


def near(best: Candidate, ranked: Sequence[Candidate], every: Sequence[Candidate]) -> list[Candidate]:
    """Ways that may be better where a figure differs a little. `ranked`: best first."""
    splits = [one for one in ranked if not one.colocated]
    middle = best if not best.colocated else next(iter(splits), None)
    alike = [one for one in every if middle is not None and one.kind == middle.kind]
    place = alike.index(middle) if middle in alike else 0
    others = {one.profile: one for one in reversed(splits) if middle is not None and one.profile != middle.profile}
    return [*(one for one in every if one.colocated), *alike[max(0, place - 1) : place + 2], *others.values()]


class Evaluator:
    """Answers for changed questions by one kind of runs, by how far each way is ahead of where it is now."""

    def __init__(
        self,
        question: Question,
        facts: Facts,
        near: Sequence[Candidate],
        runs: Callable[[Question, Sequence[Candidate]], list[Judged]],
        share: Callable[[Judged], float],
    ) -> None:
        """`near`: the ways that are looked at, the best among them. `runs`: gives a question's runs of those that can
        serve it. `share`: what of them has to be `HELD` for the load to be held."""
        self._facts = facts
        self._near = near
        self._runs = runs
        self._share = share
        found = runs(question, near)
        self._ahead = {one.candidate: max(0.0, lead) for one, lead in self._leads(question, found)}
        self._held = min(HELD, max(map(share, found)))

    def __call__(self, axis: Axis, value: float) -> Answer:
        """With one figure at `value`."""
        question, facts = axis.at(value), self._facts
        rate = value if axis.what == "rate" else 0.0
        if facts.too_much is not None and rate >= facts.too_much:
            return True, None
        found = self._runs(question, self._near)
        if not found or (max(map(self._share, found)) < self._held and not 0.0 < rate <= facts.held):
            return True, None
        leads = ((lead - self._ahead.get(one.candidate, 0.0), one) for one, lead in self._leads(question, found))
        ahead = [(lead, one.candidate) for lead, one in leads if lead > 0]
        if not ahead:
            return False, None
        # Of equal ones the colocated is taken, as in the verdict.
        return True, max(ahead, key=lambda one: (one[1].colocated, one[0]))[1]

    def _leads(self, question: Question, found: Sequence[Judged]) -> list[tuple[Judged, float]]:
        """Every other way, and by how much, as a share of what can be had, it is beyond what it takes to be chosen."""
        best = self._facts.best
        old = next((one for one in found if one.candidate == best), None)
        top = max((one.score for one in found), default=0.0)
        can = (question.workload.rate if question.workload.rate is not None else top) or 1.0
        leads = []
        for one in found:
            if one.candidate.shape == best.shape:
                continue
            equal = max(EQUAL, 1 / one.requests)
            wanted = -equal if one.candidate.colocated and not best.colocated else equal
            # A colocated way that is as good as the answer, but not as the best of all, is not chosen. An answer that
            # does not hold the requests at all is worse than anybody.
            than = 0.0 if old is None else top if wanted < 0 else old.score
            leads.append((one, (one.score - than) / can - wanted))
        return leads
