"""Every way to use a number of engines: all colocated, and each split in each mode, of each profile. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.planner.profile import Profile
from pdserve.planner.simulator import Fleet, Mode
from pdserve.rpc.errors import ConfigError

_IN_WORDS = {Mode.COLOCATED: "a colocated engine", Mode.READ: "a split in READ", Mode.WRITE: "a split in WRITE"}


class Kind(NamedTuple):
    """What decides how fast a lone request is."""

    mode: Mode
    profile: str = ""
    """As `Candidate.profile`."""

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return f"{_IN_WORDS[self.mode]}{_of(self.profile)}"

    @property
    def key(self) -> str:
        """What it is called in a document."""
        return " ".join(filter(None, (self.mode.value, self.profile)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way."""

    mode: Mode
    prefills: int = 0
    """Engines for prefill; 0 where it is colocated."""
    decodes: int = 0
    """Engines for decode."""
    engines: int = 0
    """Engines that serve whole requests; of a split, beside its pairs."""
    profile: str = ""
    """Whose engines they are, `A to B` of a mixture; empty: there is only one profile."""

    @property
    def colocated(self) -> bool:
        """Whether each engine serves whole requests."""
        return self.mode is Mode.COLOCATED

    @property
    def total(self) -> int:
        """Engines in all."""
        return self.prefills + self.decodes + self.engines

    @property
    def kind(self) -> Kind:
        """Its mode, and whose engines they are."""
        return Kind(self.mode, self.profile)

    @property
    def shape(self) -> str:
        """What it is regardless of READ and WRITE, such as `1P:3D`, or `1 colocated (mi300x-tp8)`."""
        return f"{self._engines}{_of(self.profile)}"

    @property
    def label(self) -> str:
        """Such as `1P:3D WRITE`."""
        return f"{self._engines}{'' if self.colocated else f' {self.mode.name}'}{_of(self.profile)}"

    @property
    def _engines(self) -> str:
        whole = f"{self.engines} colocated"
        if self.colocated:
            return whole
        return f"{self.prefills}P:{self.decodes}D{f' and {whole}' if self.engines else ''}"

    def accelerators(self, profile: Profile) -> int:
        """That it takes."""
        of = profile.named(self.profile)
        roles = ((self.prefills, of.prefill), (self.decodes, of.decode), (self.engines, of.colocated))
        return sum(count * role.accelerators for count, role in roles if role is not None)

    def fleet(self, profile: Profile) -> Fleet:
        """For the simulator."""
        of = profile.named(self.profile)
        return of.fleet(self.mode, prefills=self.prefills, decodes=self.decodes, engines=self.engines)


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used: so many engines, or so many accelerators."""

    engines: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError unless exactly one of both is given and above 0."""
        if (self.engines is None) == (self.gpus is None):
            raise ConfigError("say how many engines there are, or how many accelerators")
        if (self.engines or self.gpus or 0) < 1:
            raise ConfigError(f"{self.engines if self.gpus is None else self.gpus} engines: there must be at least one")

    def __str__(self) -> str:
        count, word = (self.engines, "engine") if self.gpus is None else (self.gpus, "accelerator")
        return f"{count} {word}{'' if count == 1 else 's'}"


def candidates(profile: Profile, budget: Budget) -> list[Candidate]:
    """All of them, the colocated ones first; by accelerators, those that leave none idle that one more engine could
    use. Of several profiles a split may have the prefill engines of one and the decode engines of another.

    Raises:
        ConfigError: too few for any engine of the profiles; engines of several profiles that are not counted by
            accelerators.
    """
    if profile.siblings and budget.gpus is None:
        raise ConfigError("engines of several profiles differ in size: say how many accelerators with --gpus")
    kinds = (*profile.family, *profile.mixed)
    found = [way for one in kinds for way in _ways(one, budget, one.name if profile.siblings else "")]
    if found:
        return sorted(found, key=lambda way: not way.colocated)
    verb = "is" if budget in (Budget(engines=1), Budget(gpus=1)) else "are"
    said = " or ".join(f"profile {one.name}: {_too_few(one, budget)}" for one in profile.family)
    raise ConfigError(f"{budget} {verb} too few for {said}")


def _ways(profile: Profile, budget: Budget, name: str) -> Iterator[Candidate]:
    size = {role: of.accelerators if budget.gpus is not None else 1 for role, of in profile.roles.items()}
    most = budget.gpus if budget.gpus is not None else budget.engines or 0
    if "colocated" in size and most >= size["colocated"]:
        yield Candidate(Mode.COLOCATED, engines=most // size["colocated"], profile=name)
    if "prefill" not in size:
        return
    for prefills in range(1, most // size["prefill"] + 1):
        decodes = (most - prefills * size["prefill"]) // size["decode"]
        left = most - prefills * size["prefill"] - decodes * size["decode"]
        if decodes >= 1 and left < size["prefill"]:
            yield from (Candidate(mode, prefills, decodes, profile=name) for mode in (Mode.READ, Mode.WRITE))


def _too_few(profile: Profile, budget: Budget) -> str:
    only = "it knows only splits, which take two engines at least" if profile.colocated is None else ""
    return "; ".join(filter(None, (takes(profile) if budget.gpus is not None else "", only)))


def takes(profile: Profile) -> str:
    """How many accelerators an engine of it takes, in words."""
    sizes = {name: role.accelerators for name, role in profile.roles.items()}
    if len(set(sizes.values())) == 1:
        return f"an engine takes {next(iter(sizes.values()))}"
    return ", ".join(f"a {name} engine takes {size}" for name, size in sizes.items())


def _of(profile: str) -> str:
    return f" ({profile})" if profile else ""
