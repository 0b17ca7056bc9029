"""Makes a plan: which way is best, how good it will be, what binds and what would change the answer. Pure, seeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.planner.measuring.making import MISFIT
from pdserve.planner.planning.axes import axes
from pdserve.planner.planning.binding import BRIEF, binding
from pdserve.planner.planning.candidates import Budget, Candidate, Kind, candidates
from pdserve.planner.planning.cost import cost
from pdserve.planner.planning.floors import Floor, check, floors
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval, predict, predict_share
from pdserve.planner.planning.plan import Plan
from pdserve.planner.planning.present import Present, judge_present
from pdserve.planner.planning.ranking import rank
from pdserve.planner.planning.rivals import Facts, near
from pdserve.planner.planning.screening import LOWER, Screened, screen
from pdserve.planner.planning.switches import Searched, switches
from pdserve.planner.planning.trial import Judged, Question
from pdserve.planner.planning.workload import Workload
from pdserve.planner.profile import Profile
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to find out."""

    seed: int = 0
    requests: int | None = None
    """Of a run, however long its answers; None: by the rule of `length`."""
    goodput: bool = True
    """Whether to look for the highest rates that hold."""
    binding: bool = True
    """Whether to look for what binds."""
    switches: bool = True
    """Whether to look for what would change the answer."""
    cost_per_engine_hour: float | None = None
    """In any currency; of an engine of the first profile, where there are several."""
    allow_misfit: bool = False
    """Plan with a profile that says itself that it does not fit."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be."""
        if self.requests is not None and self.requests < 10:
            raise ConfigError(f"runs of {self.requests} requests: ten at least")
        if self.cost_per_engine_hour is not None and not self.cost_per_engine_hour > 0:
            raise ConfigError(f"a cost of {self.cost_per_engine_hour:g} an hour: it must be above 0")


def decide(question: Question, budget: Budget, settings: Settings, present: Candidate | None = None) -> Plan:
    """Plans; the same arguments give the same plan.

    `present`: what runs now, to be judged beside.

    Raises:
        ConfigError: a profile that does not fit, more tokens than the context or the memory, an SLO that no request
            can meet, too few engines; an open loop with no SLO, where all ways are alike.
    """
    for profile in question.profile.family:
        check_profile(profile, settings)
        _check_fits(profile, question.workload)
    if question.slo.empty and question.workload.rate is not None:
        raise ConfigError("at a given rate and without an SLO every way is as good: give an SLO, or --concurrency")
    every = candidates(question.profile, budget)
    lone = floors(question, every)
    impossible = {kind: words for kind, words in check(question.slo, lone).items() if words}
    able = [one for one in every if one.kind not in impossible]
    asked = question
    screened = screen(question, able, settings.requests, settings.seed)
    goodputs: Mapping[Candidate, Goodput] = {}
    if settings.goodput and question.workload.rate is not None:
        ranked = rank(screened, settings.requests)
        screened, goodputs = ranked.screened, ranked.goodputs
    question, count = screened.question, screened.count
    best, opponent = screened.best, screened.opponent
    found = goodputs.get(best.candidate)
    highest = found.value.mean if found is not None and found.value is not None else None
    binds = None
    if settings.binding:
        binds = binding(question, best.candidate, highest, min(count, BRIEF), settings.seed)
    searched = None
    if settings.switches:
        searched = _searched(asked, screened, goodputs, lone, able, settings)
    per_hour = settings.cost_per_engine_hour
    return Plan(
        question=question,
        asked=asked.workload,
        budget=budget,
        floors=lone,
        impossible=impossible,
        screened=screened,
        attainment=_attainment(best, count),
        score=_score(question, best, count),
        opponent_attainment=None if opponent is None else _attainment(opponent, count),
        goodputs=goodputs,
        binding=binds,
        searched=searched,
        cost=None if per_hour is None else cost(question, best, per_hour),
        present=None if present is None else _present(asked, present, count, settings),
    )


def _searched(
    asked: Question,
    screened: Screened,
    goodputs: Mapping[Candidate, Goodput],
    lone: Mapping[Kind, Floor],
    able: Sequence[Candidate],
    settings: Settings,
) -> Searched:
    """What would change the answer, and does not contradict it."""
    question, best = screened.question, screened.best.candidate
    rate = question.workload.rate
    lowered = asked.workload != question.workload and rate is not None
    facts = Facts(
        best,
        held=max((one.held for one in goodputs.values()), default=0.0),
        too_much=(rate or 0.0) / LOWER if lowered else None,
    )
    ways = near(best, [one.candidate for one in screened.all], able)
    moved = list(axes(question, [lone[one.kind] for one in ways]))
    return switches(question, facts, ways, moved, settings.seed, settings.requests)


def _present(question: Question, present: Candidate, count: int, settings: Settings) -> Present:
    goes = settings.goodput and question.workload.rate is not None
    return judge_present(question, present, count, settings.seed, settings.requests, with_goodput=goes)


def _attainment(one: Judged, count: int) -> Interval:
    return predict_share([trial.attainment for trial in one.trials], count)


def _score(question: Question, one: Judged, count: int) -> Interval:
    """Good requests a second; at a given rate they are as uncertain as the attainment is."""
    rate = question.workload.rate
    if rate is None:
        return predict([trial.score for trial in one.trials])
    share = _attainment(one, count)
    return Interval(share.mean * rate, share.low * rate, share.high * rate, share.runs)


def check_profile(profile: Profile, settings: Settings) -> None:
    """Raises ConfigError for one that says of itself that it does not fit, unless that is allowed."""
    why = profile.fit.get(MISFIT)
    if why and not settings.allow_misfit:
        raise ConfigError(f"profile {profile.name} does not fit what was measured: {why}")


def _check_fits(profile: Profile, workload: Workload) -> None:
    context = profile.max_model_len
    if context is not None and workload.longest > context:
        raise ConfigError(
            f"a request of {workload.longest} tokens, prompt and answer, is more than the context of {context}"
        )
    for name, role in profile.roles.items():
        if workload.longest > role.spec.kv_tokens:
            raise ConfigError(
                f"a request of {workload.longest} tokens does not fit into the KV memory of a {name} engine, "
                f"{role.spec.kv_tokens} tokens"
            )
