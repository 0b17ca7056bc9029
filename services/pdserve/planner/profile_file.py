"""Profiles as small TOML files: reads, checks and writes them.

    name, about, source                     who was measured, and where the numbers come from
    max_model_len                           most tokens of a request, prompt and answer; may be left out
    [prefill] [decode] [colocated]          a role each: the cost model's constants, token_budget, max_seqs,
                                            kv_tokens, accelerators (of one engine), source
    [handover]                              see simulator.Handover; tail_write may be left out: as tail; source
    [proxy]                                 dispatch, egress, routing, headroom
    [fit]                                   how the numbers were found, and what is left over; free keys

A role that was not measured is left out. All times are seconds, memory is tokens and bytes.
"""

import math
import tomllib
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from pdserve.costmodel import CostModel
from pdserve.planner.profile import Profile, RoleProfile
from pdserve.planner.simulator import EngineSpec, Handover, Role, Routing
from pdserve.rpc.errors import ConfigError


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
    if "max_model_len" in data:
        values["max_model_len"] = top.number("max_model_len", whole=True)
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
    if profile.max_model_len is not None:
        lines.append(f"max_model_len = {profile.max_model_len}")
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


def _pairs(value: CostModel | Handover) -> list[str]:
    found = []
    for item in fields(value):
        one = getattr(value, item.name)
        if one is None:
            continue  # left out is what it means
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
