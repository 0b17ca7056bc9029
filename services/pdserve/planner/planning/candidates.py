"""Every way to use a number of engines: all colocated, and each split in each mode. Pure."""

from dataclasses import dataclass

from pdserve.planner.profile import Profile
from pdserve.planner.simulator import Fleet, Mode
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way."""

    mode: Mode
    prefills: int = 0
    """Engines for prefill; 0 where it is colocated."""
    decodes: int = 0
    """Engines for decode."""
    engines: int = 0
    """Engines that serve whole requests; 0 where it is split."""

    @property
    def colocated(self) -> bool:
        """Whether each engine serves whole requests."""
        return self.mode is Mode.COLOCATED

    @property
    def total(self) -> int:
        """Engines in all."""
        return self.prefills + self.decodes + self.engines

    @property
    def shape(self) -> str:
        """What it is regardless of READ and WRITE, such as `1P:3D`."""
        return f"{self.engines} colocated" if self.colocated else f"{self.prefills}P:{self.decodes}D"

    @property
    def label(self) -> str:
        """Such as `1P:3D WRITE`."""
        return self.shape if self.colocated else f"{self.shape} {self.mode.name}"

    def accelerators(self, profile: Profile) -> int:
        """That it takes."""
        roles = ((self.prefills, profile.prefill), (self.decodes, profile.decode), (self.engines, profile.colocated))
        return sum(count * role.accelerators for count, role in roles if role is not None)

    def fleet(self, profile: Profile) -> Fleet:
        """For the simulator."""
        return profile.fleet(self.mode, prefills=self.prefills, decodes=self.decodes, engines=self.engines)


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
    """All of them, the colocated one first; by accelerators, those that leave none idle that one more engine could use.

    Raises:
        ConfigError: too few for any engine of the profile.
    """
    found = []
    size = {
        name: role.accelerators if budget.gpus is not None else 1
        for name, role in (("prefill", profile.prefill), ("decode", profile.decode), ("colocated", profile.colocated))
        if role is not None
    }
    most = budget.gpus if budget.gpus is not None else budget.engines or 0
    if "colocated" in size and most >= size["colocated"]:
        found.append(Candidate(Mode.COLOCATED, engines=most // size["colocated"]))
    if "prefill" in size:
        for prefills in range(1, most // size["prefill"] + 1):
            decodes = (most - prefills * size["prefill"]) // size["decode"]
            left = most - prefills * size["prefill"] - decodes * size["decode"]
            if decodes >= 1 and left < size["prefill"]:
                found += [Candidate(mode, prefills, decodes) for mode in (Mode.READ, Mode.WRITE)]
    if not found:
        why = "it knows only splits, which take two engines at least" if "colocated" not in size else ""
        if budget.gpus is not None:
            why = f"{takes(profile)}{f'; {why}' if why else ''}"
        verb = "is" if most == 1 else "are"
        raise ConfigError(f"{budget} {verb} too few for profile {profile.name}: {why}")
    return found


def takes(profile: Profile) -> str:
    """How many accelerators an engine of it takes, in words."""
    roles = (("prefill", profile.prefill), ("decode", profile.decode), ("colocated", profile.colocated))
    sizes = {name: role.accelerators for name, role in roles if role is not None}
    if len(set(sizes.values())) == 1:
        return f"an engine takes {next(iter(sizes.values()))}"
    return ", ".join(f"a {name} engine takes {size}" for name, size in sizes.items())
