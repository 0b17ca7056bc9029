"""A profile: what one kind of deployment costs, as a small TOML file. Loads, checks and writes it.

    name, about, source                     who was measured, and where the numbers come from
    [prefill] [decode] [colocated]          a role each: the cost model's constants, token_budget, max_seqs,
                                            kv_tokens, accelerators (of one engine), source
    [handover]                              see simulator.Handover; source
    [proxy]                                 dispatch, egress, routing, headroom
    [fit]                                   how the numbers were found, and what is left over; free keys

A role that was not measured is left out. All times are seconds, memory is tokens and bytes.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pdserve.costmodel import CostModel
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
    """See the module."""

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
    fit: Mapping[str, Figure] = field(default_factory=dict)
    """How the numbers were found."""

    def fleet(self, mode: Mode, *, prefills: int = 0, decodes: int = 0, engines: int = 0) -> Fleet:
        """`prefills` and `decodes` for READ and WRITE, `engines` for COLOCATED.

        Raises:
            ConfigError: the profile lacks a role that is needed, or the numbers make no fleet.
        """
        colocated = mode is Mode.COLOCATED
        wanted = {"colocated": self.colocated} if colocated else {"prefill": self.prefill, "decode": self.decode}
        if missing := [name for name, role in wanted.items() if role is None]:
            raise ConfigError(f"profile {self.name}: has no numbers for {' and '.join(missing)} engines")
        specs = {
            name: role.spec
            for name, role in (("prefill", self.prefill), ("decode", self.decode), ("both", self.colocated))
            if role is not None
        }
        return Fleet(
            roles=(Role.BOTH,) * engines if colocated else split(prefills, decodes),
            mode=mode,
            handover=self.handover,
            dispatch=self.dispatch,
            egress=self.egress,
            routing=self.routing,
            headroom=self.headroom,
            **specs,
        )


def shipped() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = resources.files("pdserve.planner") / "profiles"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or any by the path of its file.

    Raises:
        ConfigError: no such profile, or one that is malformed.
    """
    name = str(name_or_path)
    if name in shipped():
        text = (resources.files("pdserve.planner") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
        return parse(text, name)
    try:
        text = Path(name_or_path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"profile {name}: neither shipped ({', '.join(shipped())}) nor a file that can be read: {error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"profile {name}: not a text file: {error}") from error
    return parse(text, name)


def parse(text: str, where: str = "profile") -> Profile:
    """A profile from TOML.

    Raises:
        ConfigError: not TOML, an unknown or missing key, a value of the wrong kind or range.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"profile {where}: not TOML: {error}") from error
    top = _Table(data, where)
    values: dict[str, Any] = {key: top.text(key) for key in ("name", "about", "source")}
    roles: dict[str, Any] = {key: _role(top.table(key)) for key in ("prefill", "decode", "colocated") if key in data}
    values.update(roles)
    if "handover" in data:
        table = top.table("handover")
        values["handover_source"] = table.text("source", "")
        if "first_token" in table.data:
            table.data["first_token"] = table.choice("first_token", Role)
        values["handover"] = Handover(**table.numbers(Handover, free=("first_token",)))
    if "proxy" in data:
        table = top.table("proxy")
        if "routing" in table.data:
            values["routing"] = table.choice("routing", Routing)
            table.taken.add("routing")
        for key in ("dispatch", "egress", "headroom"):
            if key in table.data:
                values[key] = table.number(key, whole=key == "headroom")
        table.done()
    if "fit" in data:
        values["fit"] = top.table("fit").data
    top.done()
    if not roles:
        raise ConfigError(f"profile {where}: has none of [prefill], [decode], [colocated]")
    if ("prefill" in roles) != ("decode" in roles):
        raise ConfigError(f"profile {where}: [prefill] and [decode] come together")
    return Profile(**values)


def dumps(profile: Profile) -> str:
    """The profile as TOML; `parse` gives the same profile back."""
    lines = [f"{key} = {_quote(getattr(profile, key))}" for key in ("name", "about", "source")]
    for key in ("prefill", "decode", "colocated"):
        role: RoleProfile | None = getattr(profile, key)
        if role is None:
            continue
        lines += ["", f"[{key}]", *_pairs(role.spec.cost)]
        lines += [f"{name} = {getattr(role.spec, name)}" for name in ("token_budget", "max_seqs", "kv_tokens")]
        lines += [f"accelerators = {role.accelerators}", f"source = {_quote(role.source)}"]
    lines += ["", "[handover]", *_pairs(profile.handover), f"source = {_quote(profile.handover_source)}"]
    lines += ["", "[proxy]", f"dispatch = {profile.dispatch!r}", f"egress = {profile.egress!r}"]
    lines += [f'routing = "{profile.routing.value}"', f"headroom = {profile.headroom}"]
    if profile.fit:
        lines += ["", "[fit]"]
        lines += [f"{key} = {_quote(v) if isinstance(v, str) else repr(v)}" for key, v in profile.fit.items()]
    return "\n".join(lines) + "\n"


def with_costs(role: RoleProfile, **costs: float) -> RoleProfile:
    """A copy with other constants of the cost model."""
    return replace(role, spec=replace(role.spec, cost=replace(role.spec.cost, **costs)))


def _pairs(value: CostModel | Handover) -> list[str]:
    found = []
    for item in fields(value):
        one = getattr(value, item.name)
        found.append(f"{item.name} = " + (f'"{one.value}"' if isinstance(one, Role) else repr(one)))
    return found


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _role(table: "_Table") -> RoleProfile:
    source = table.text("source", "")
    accelerators = table.number("accelerators", whole=True) if "accelerators" in table.data else 1
    if accelerators < 1:
        raise ConfigError(f"{table.where}: accelerators must be at least 1, not {accelerators}")
    costs = {}
    for item in fields(CostModel):
        # All must be said: a default would be another deployment's figure.
        costs[item.name] = table.number(item.name)
    sizes = table.numbers(EngineSpec, skip=("cost",))
    return RoleProfile(EngineSpec(cost=CostModel(**costs), **sizes), int(accelerators), source)


class _Table:
    """One table of the file, and which of its keys were taken."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = dict(data)
        self.where = where
        self.taken: set[str] = set()

    def table(self, key: str) -> "_Table":
        value = self._take(key)
        if not isinstance(value, dict):
            raise ConfigError(f"profile {self.where}: {key} must be a table")
        return _Table(value, f"{self.where} [{key}]")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"profile {self.where}: {key} must be text, not {value!r}")
        return value

    def number(self, key: str, *, whole: bool = False) -> Any:
        value = self._take(key)
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or math.isnan(value):
            raise ConfigError(f"profile {self.where}: {key} must be a {'whole ' * whole}number, not {value!r}")
        return value

    def choice(self, key: str, kind: Any) -> Any:
        value = self.data[key]
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(item.value for item in kind)
            raise ConfigError(f"profile {self.where}: {key} is one of {names}, not {value!r}") from None

    def numbers(self, kind: Any, *, free: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> dict[str, Any]:
        """All keys that are left, as arguments of a dataclass; its whole numbers stay whole."""
        found: dict[str, Any] = {}
        for item in fields(kind):
            if item.name in self.data and item.name not in skip:
                whole = item.type is int
                found[item.name] = self._take(item.name) if item.name in free else self.number(item.name, whole=whole)
        self.done()
        return found

    def done(self) -> None:
        """Raises ConfigError where keys are left."""
        if unknown := sorted(set(self.data) - self.taken):
            raise ConfigError(f"profile {self.where}: unknown {', '.join(unknown)}")

    def _take(self, key: str, default: Any = None) -> Any:
        self.taken.add(key)
        value = self.data.get(key, default)
        if value is None:
            raise ConfigError(f"profile {self.where}: {key} is missing")
        return value
