"""A profile: what one kind of deployment costs. Values only; `profile_file` has it as TOML."""

import itertools
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

    @property
    def mixed(self) -> "tuple[Profile, ...]":
        """Prompts on engines of one of its family and answers on those of another, each way round."""
        pairs = itertools.permutations(self.family, 2)
        return tuple(made for prefill, decode in pairs if (made := mixture(prefill, decode)) is not None)

    def named(self, name: str) -> "Profile":
        """That one of its family, or of the mixtures in it; itself where the name is empty.

        Raises:
            ConfigError: there is none of that name.
        """
        for one in itertools.chain(self.family, self.mixed):
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


def mixture(prefill: Profile, decode: Profile) -> Profile | None:
    """A split of prefill engines of one profile and decode engines of another; None: no KV can go between them, since a
    role is missing or the models differ.

    What a hand-over between them costs was not measured: of each figure the worse one of both is taken.
    """
    one, other = prefill.handover, decode.handover
    if (
        prefill.prefill is None
        or decode.decode is None
        or (one.layers, one.first_token) != (other.layers, other.first_token)
    ):
        return None
    read, write = (max(one.tail_in(mode), other.tail_in(mode)) for mode in (Mode.READ, Mode.WRITE))
    contexts = [most for most in (prefill.max_model_len, decode.max_model_len) if most is not None]
    return Profile(
        name=f"{prefill.name} to {decode.name}",
        about=f"prefill: {prefill.about}; decode: {decode.about}",
        source=f"{prefill.source}; {decode.source}",
        prefill=prefill.prefill,
        decode=decode.decode,
        handover=Handover(
            serialization=max(one.serialization, other.serialization),
            tail=read,
            tail_write=write,
            bytes_per_token=max(one.bytes_per_token, other.bytes_per_token),
            bandwidth=min(one.bandwidth, other.bandwidth),
            layers=one.layers,
            first_token=one.first_token,
        ),
        handover_source="of each figure the worse one of both profiles'",
        dispatch=max(prefill.dispatch, decode.dispatch),
        egress=max(prefill.egress, decode.egress),
        routing=prefill.routing,
        headroom=max(prefill.headroom, decode.headroom),
        max_model_len=min(contexts, default=None),
    )


def with_costs(role: RoleProfile, **costs: float) -> RoleProfile:
    """A copy with other constants of the cost model."""
    return replace(role, spec=replace(role.spec, cost=replace(role.spec.cost, **costs)))
