"""The plan: which way to use the engines, how good it will be, what binds and what would change it. Pure, seeded."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.bench.goodput import THRESHOLD
from pdserve.planner.measuring.making import MISFIT
from pdserve.planner.planning.axes import axes
from pdserve.planner.planning.binding import BRIEF, Binding, binding
from pdserve.planner.planning.candidates import Budget, Candidate, Kind, candidates
from pdserve.planner.planning.floors import Floor, check, floors
from pdserve.planner.planning.goodputs import Goodput
from pdserve.planner.planning.interval import Interval, predict, predict_share
from pdserve.planner.planning.present import Present, judge_present
from pdserve.planner.planning.ranking import rank
from pdserve.planner.planning.screening import LOWER, Screened, screen
from pdserve.planner.planning.switches import Facts, Searched, near, switches
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


@dataclass(frozen=True, slots=True)
class Cost:
    """Per million tokens, in the currency that was given."""

    good: float | None
    """Prompt and answer tokens of requests that met every objective; None: there were none."""
    good_output: float | None
    """Their answers' tokens alone."""


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
        lowered = asked.workload != question.workload and question.workload.rate is not None
        too_much = (question.workload.rate or 0.0) / LOWER if lowered else None
        facts = Facts(best.candidate, highest or 0.0, too_much)
        ways = near(best.candidate, [one.candidate for one in screened.all], able)
        kinds = [lone[one.kind] for one in ways]
        searched = switches(question, facts, ways, list(axes(question, kinds)), settings.seed, settings.requests)
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
        cost=_cost(question, best, settings.cost_per_engine_hour),
        present=None if present is None else _present(asked, present, count, settings),
    )


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


def _cost(question: Question, best: Judged, per_hour: float | None) -> Cost | None:
    if per_hour is None:
        return None
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


__all__ = ["Budget", "Candidate", "Cost", "Plan", "Question", "Settings", "decide"]
