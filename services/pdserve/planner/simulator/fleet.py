"""What is simulated: engines, how they hand over, what they are asked for, and what befalls them. Values only."""

import math
from dataclasses import dataclass, field
from enum import Enum

from pdserve.costmodel import PUBLISHED, CostModel
from pdserve.rpc.errors import ConfigError


class Role(Enum):
    """What an engine is routed to for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Mode(Enum):
    """How a request is served."""

    COLOCATED = "colocated"
    """One engine computes the prompt and the answer."""
    READ = "read"
    """Decode is asked after prefill, and pulls."""
    WRITE = "write"
    """Both are asked at once, and prefill pushes while it computes."""


class Routing(Enum):
    """How engines are chosen."""

    LEAST_LOAD = "least_load"
    """As the proxy does: the least loaded engine that has credits; requests wait where none has."""
    ROUND_ROBIN = "round_robin"
    """Engines take turns, whatever they have to do."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine in one role."""

    cost: CostModel = PUBLISHED
    """Time of a step."""
    token_budget: int = 8192
    """Most tokens computed in one step; a prompt that does not fit is computed in chunks."""
    max_seqs: int = 1024
    """Most sequences that run at once."""
    kv_tokens: int = 1_000_000
    """Tokens that the KV memory holds."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1, or a budget that cannot decode all sequences at once."""
        for name in ("token_budget", "max_seqs", "kv_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"engine: {name} must be a whole number of at least 1, not {value!r}")
        if self.max_seqs > self.token_budget:
            raise ConfigError(
                f"engine: max_seqs ({self.max_seqs}) must not exceed token_budget ({self.token_budget}): "
                "every running sequence decodes in every step"
            )


@dataclass(frozen=True, slots=True)
class Handover:
    """What moving a prompt's KV from prefill to decode costs."""

    serialization: float = 0.0
    """READ: from the end of prefill to decode's receipt of the request, seconds."""
    tail: float = 0.0
    """From the last byte to decode's scheduler knowing of it, seconds; READ's, and WRITE's where that has no own."""
    tail_write: float | None = None
    """The same in WRITE; None: as `tail`."""
    bytes_per_token: float = 0.0
    """KV of one token, over all layers and ranks."""
    bandwidth: float = math.inf
    """Of each engine's link, in and out each, bytes per second; shared evenly by what moves at once."""
    layers: int = 64
    """WRITE cannot push the last layer before the step ends."""
    first_token: Role = Role.DECODE
    """Who makes the token that ends TTFT: DECODE, or PREFILL (sent before the hand-over)."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a cost that cannot be."""
        for name in ("serialization", "tail", "tail_write", "bytes_per_token"):
            value = getattr(self, name)
            if name == "tail_write" and value is None:
                continue
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"handover: {name} must be 0 or more, not {value!r}")
        if not (isinstance(self.bandwidth, int | float) and self.bandwidth > 0):
            raise ConfigError(f"handover: bandwidth must be above 0, not {self.bandwidth!r}")
        if not isinstance(self.layers, int) or self.layers < 1:
            raise ConfigError(f"handover: layers must be at least 1, not {self.layers!r}")
        if self.first_token not in (Role.DECODE, Role.PREFILL):
            raise ConfigError("handover: first_token must be decode or prefill")

    def tail_in(self, mode: Mode) -> float:
        """Seconds."""
        return self.tail if mode is not Mode.WRITE or self.tail_write is None else self.tail_write


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines behind one proxy."""

    roles: tuple[Role, ...]
    """Of each engine at the start."""
    mode: Mode
    """READ and WRITE need prefill and decode engines; engines for both serve alone."""
    prefill: EngineSpec = field(default_factory=EngineSpec)
    """Any engine in this role."""
    decode: EngineSpec = field(default_factory=EngineSpec)
    """Any engine in this role."""
    both: EngineSpec = field(default_factory=EngineSpec)
    """Any engine in this role."""
    handover: Handover = field(default_factory=Handover)
    """Between any two engines."""
    dispatch: float = 0.0
    """From the client's sending to the engine's queue, seconds."""
    egress: float = 0.0
    """From a token's step to the client, seconds."""
    routing: Routing = Routing.LEAST_LOAD
    """How engines are chosen."""
    headroom: int = 256
    """Tokens of each answer that least-load routing reserves on the engine that answers."""

    def __post_init__(self) -> None:
        """Raises ConfigError where nothing could serve, or a time or headroom is negative."""
        if self.mode is Mode.COLOCATED and Role.BOTH not in self.roles:
            raise ConfigError("fleet: colocated serving needs an engine for both phases")
        if self.mode is not Mode.COLOCATED and not {Role.PREFILL, Role.DECODE} <= set(self.roles):
            raise ConfigError(f"fleet: {self.mode.value} needs a prefill and a decode engine")
        for name in ("dispatch", "egress", "headroom"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"fleet: {name} must be 0 or more, not {getattr(self, name)!r}")

    def spec(self, role: Role) -> EngineSpec:
        """An engine of that role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}[role]

    @property
    def label(self) -> str:
        """Such as `1P4D write` or `2x colocated`."""
        if self.mode is Mode.COLOCATED:
            return f"{self.roles.count(Role.BOTH)}x colocated"
        return f"{self.roles.count(Role.PREFILL)}P{self.roles.count(Role.DECODE)}D {self.mode.value}"


def split(prefills: int, decodes: int) -> tuple[Role, ...]:
    """Roles of an xPyD fleet."""
    return (Role.PREFILL,) * prefills + (Role.DECODE,) * decodes


@dataclass(frozen=True, slots=True)
class Job:
    """One request's size, in tokens."""

    prompt: int
    """Of the prompt."""
    output: int
    """Of the answer; it always comes to that."""
    hit: int = 0
    """Of the prompt, found in the prefix cache of the engine that computes it; at least one token is computed."""
    decode_hit: int = 0
    """Of the prompt, already on the decode engine, hence not moved."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that cannot be."""
        if self.prompt < 1 or self.output < 1:
            raise ConfigError(f"job: a prompt and an answer have at least one token, not {self.prompt}, {self.output}")
        if not (0 <= self.hit <= self.prompt and 0 <= self.decode_hit <= self.prompt):
            raise ConfigError(f"job: hits ({self.hit}, {self.decode_hit}) must lie within the prompt ({self.prompt})")


@dataclass(frozen=True, slots=True)
class EngineDies:
    """The engine is gone with all it held; its requests are tried again."""

    at: float
    """Seconds."""
    engine: int
    """Index in Fleet.roles."""


@dataclass(frozen=True, slots=True)
class EngineReturns:
    """The engine is back, and empty."""

    at: float
    """Seconds."""
    engine: int
    """Index in Fleet.roles."""


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """From now on the engine is routed to for another role; what it has begun, it ends."""

    at: float
    """Seconds."""
    engine: int
    """Index in Fleet.roles."""
    role: Role
    """The new one."""


Happening = EngineDies | EngineReturns | RoleChanges
