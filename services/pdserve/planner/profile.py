"""A profile: what one kind of deployment costs. Values only; `profile_file` has it as TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdserve.planner.simulator import EngineSpec, Fleet, Handover, Mode, Role, Routing, split
from pdserve.rpc.errors import ConfigError

Figure = str | int | float


@dataclass(frozen=True, slots=True)
class RoleProfile:
    """An engine in one role."""

    spec: EngineSpec
    """Its speed and size."""
    accelerators: int = 1
    """That one engine takes."""
    source: str = ""
    """Where the numbers come from."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of deployment."""

    name: str
    """Short, as the file is called."""
    about: str
    """Hardware and model, for people."""
    source: str
    """Where the numbers come from."""
    prefill: RoleProfile | None = None
    """An engine that computes prompts for others."""
    decode: RoleProfile | None = None
    """An engine that answers from KV of others."""
    colocated: RoleProfile | None = None
    """An engine that does both."""
    handover: Handover = field(default_factory=Handover)
    """Between prefill and decode."""
    handover_source: str = ""
    """Where its numbers come from."""
    dispatch: float = 0.0
    """From sending to the engine's queue, seconds."""
    egress: float = 0.0
    """From a token's step to the client, seconds."""
    routing: Routing = Routing.LEAST_LOAD
    """How the proxy chose when this was measured, and is simulated to."""
    headroom: int = 256
    """Tokens of each answer that the proxy reserves."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and answer; None: not known."""
    fit: Mapping[str, Figure] = field(default_factory=dict)
    """How the numbers were found."""
    siblings: tuple["Profile", ...] = ()
    """The same model on engines of another size, weighed beside it. No part of the file."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a context that cannot be, or two profiles of one name."""
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"profile {self.name}: max_model_len must be at least 2, not {self.max_model_len}")
        names = [one.name for one in self.family]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two of the profiles are called {twice}: give each another name")

    @property
    def family(self) -> "tuple[Profile, ...]":
        """Itself and its siblings."""
        return (self, *self.siblings)

    @property
    def roles(self) -> dict[str, RoleProfile]:
        """Those that were measured, by name."""
        roles = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {name: role for name, role in roles.items() if role is not None}

    def named(self, name: str) -> "Profile":
        """That one of its family; itself where the name is empty.

        Raises:
            ConfigError: there is none of that name.
        """
        for one in self.family:
            if name in ("", one.name):
                return one
        raise ConfigError(f"no profile {name} beside {self.name}")

    def fleet(self, mode: Mode, *, prefills: int = 0, decodes: int = 0, engines: int = 0) -> Fleet:
        """`prefills` and `decodes` for READ and WRITE, `engines` for COLOCATED; of a split, those that serve whole
        requests where no pair has room.

        Raises:
            ConfigError: the profile lacks a role that is needed, or the numbers make no fleet.
        """
        colocated = mode is Mode.COLOCATED
        wanted = {} if colocated else {"prefill": self.prefill, "decode": self.decode}
        if colocated or engines:
            wanted["colocated"] = self.colocated
        if missing := [name for name, role in wanted.items() if role is None]:
            raise ConfigError(f"profile {self.name}: has no numbers for {' and '.join(missing)} engines")
        specs = {
            name: role.spec
            for name, role in (("prefill", self.prefill), ("decode", self.decode), ("both", self.colocated))
            if role is not None
        }
        return Fleet(
            roles=(*split(prefills, decodes), *(Role.BOTH,) * engines),
            mode=mode,
            handover=self.handover,
            dispatch=self.dispatch,
            egress=self.egress,
            routing=self.routing,
            headroom=self.headroom,
            **specs,
        )


def with_costs(role: RoleProfile, **costs: float) -> RoleProfile:
    """A copy with other constants of the cost model."""
    return replace(role, spec=replace(role.spec, cost=replace(role.spec.cost, **costs)))
