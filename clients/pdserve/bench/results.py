"""What a measurement leaves: one JSON document. Seconds, bytes, tokens, and rates per second throughout.

`results.schema.json` beside this file is made from these classes (`python -m pdserve.bench.schema`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError

SCHEMA = "pdserve.bench/1"
"""Changes when a field changes its meaning or goes; new fields may come without."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are distributed; percentiles are numpy's, with linear interpolation."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed."""

    reason: str
    """UPPER_SNAKE, as pdserve's errors have it; HTTP_<status> where an endpoint gave no reason of its own."""
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """One request."""

    index: int
    """Its place in the workload, from 0."""
    due: float
    """When it should have been sent: seconds from the run's start."""
    sent: float
    """When it was sent."""
    prompt_tokens: int
    """As the endpoint counted them; what was asked for where it did not say."""
    cached_tokens: int
    """Prompt tokens that the endpoint found in a prefix cache."""
    output_tokens: int
    ttft: float | None
    """Sent to first token; null: none came."""
    itls: tuple[float, ...]
    """Gaps between the chunks with tokens, in order; a chunk of several tokens has one gap."""
    tpot: float | None
    """(e2e - ttft) / (output_tokens - 1); null where fewer than two tokens came."""
    e2e: float | None
    """Sent to last token; null: the request failed."""
    mode: str = ""
    """How the KV cache was handed over: read or write; empty: it was not, or the endpoint did not say."""
    transport: str = ""
    """What moved it; empty as `mode`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Disjoint parts of the time to first token as the proxy measured them, in order; empty where it did not say."""
    unattributed: float = 0.0
    """What no part explains."""
    missed: tuple[str, ...] = ()
    """The objectives that it missed: ttft, itl, tpot, e2e; `error` alone where it failed. Empty: it was good."""
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Of durations only requests that completed count; null where there is none."""

    requests: int
    """All that were sent, failed ones included."""
    completed: int
    failed: int
    attainment: float
    """Share of all requests that met every objective; a failed one met none."""
    good_rate: float
    """attainment x the offered rate; of a closed loop: good requests a second."""
    request_throughput: float
    """Completed requests a second, over the run's duration."""
    output_token_throughput: float
    """Generated tokens a second, of completed requests."""
    total_token_throughput: float
    """Prompt and generated tokens a second, of completed requests."""
    ttft: Spread | None
    itl: Spread | None
    """Over all gaps of all requests."""
    tpot: Spread | None
    e2e: Spread | None
    late: Spread | None
    """Sent minus due, of all requests: how late the client itself was. Of a closed loop null: nothing is due."""
    parts: Mapping[str, Spread] = field(default_factory=dict)
    """Of each part of TTFT, in order; a request without the part counts as 0."""
    unattributed: Spread | None = None
    missed: Mapping[str, int] = field(default_factory=dict)
    """How many requests missed each objective; `error`: how many failed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load, offered once. Exactly one of `rate` and `concurrency` is not null."""

    rate: float | None
    """Offered, requests a second (open loop); of a replayed trace its own."""
    concurrency: int | None
    """Requests kept in flight (closed loop)."""
    started: str
    """ISO 8601, UTC."""
    duration: float
    """The run's start to the end of its last request, seconds."""
    summary: Summary
    requests: tuple[Record, ...]
    """By index; what was not sent in a partial run is not here."""
    partial: bool = False
    """The run broke off."""
    doubts: tuple[str, ...] = ()
    """What would make a reader misjudge its figures, in words."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine behind the endpoint, where it says so."""

    id: str
    role: str


@dataclass(frozen=True, slots=True)
class Target:
    """What was measured."""

    address: str
    api: Literal["grpc", "http"]
    model: str
    mode: str = ""
    """How the KV cache was handed over: read or write; empty: colocated, or unknown."""
    transport: str = ""
    """What moved it in the probe before the run; empty: nothing was handed over, or unknown."""
    engines: tuple[EngineFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the client ran on."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_gib: float
    system: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What was asked for; enough to ask for it again."""

    scenario: str
    """1K/1K and the like; empty: lengths were given by hand."""
    lengths: Mapping[str, Any]
    """`kind` (fixed, uniform, dataset, trace) and what it takes."""
    arrivals: Mapping[str, Any]
    """`kind` (like_vllm, poisson, gamma, replay, closed) and what it takes."""
    requests: int
    """Of each run."""
    seed: int


@dataclass(frozen=True, slots=True)
class Tried:
    """One rate of a search for the goodput."""

    rate: float
    attainment: float
    requests: int = 0
    """Behind the attainment; 0: not kept, by an older version."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest offered rate whose attainment is at least the threshold."""

    threshold: float
    """In (0, 1]."""
    value: float
    """Requests a second; the highest rate that was tried and held. 0: not even the lowest did."""
    low: float
    """The highest rate tried, up to `value`, that held by more than the 95 % interval of its share; 0: none."""
    high: float | None
    """The lowest rate tried above `value` that fell short by more than that; null: none."""
    tried: tuple[Tried, ...]
    """In the order of trying."""
    why: str
    """How it was found and why the search ended, in words."""


@dataclass(frozen=True, slots=True)
class Results:
    """The whole document."""

    schema: str
    """`SCHEMA`."""
    created: str
    """ISO 8601, UTC."""
    label: str
    """The user's name for this measurement."""
    target: Target
    machine: Machine
    workload: Workload
    slo: Slo
    runs: tuple[Run, ...]
    goodput: Goodput | None = None
    partial: bool = False
    """Something broke off: at least one run is missing or not whole."""
    why_partial: str = ""


def dump(results: Results) -> bytes:
    """The document, a request a line: it can be read by eye, and a gap between tokens is not a line of its own."""
    # In a JSON text these bytes begin a record and nothing else: inside a string the quotes would be escaped.
    return msgspec.json.encode(results).replace(b'{"index":', b'\n{"index":') + b"\n"


def save(results: Results, path: Path) -> None:
    """Writes the document, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_bytes(dump(results))
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> Results:
    """Reads a document back.

    Raises:
        ConfigError: it cannot be read, is no such document, or is one of another version.
    """
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is no result of `pdserve bench`: {error.message}") from error


def parse(data: bytes) -> Results:
    """The document that `data` is.

    Raises:
        ConfigError: it is none, or one of another version.
    """
    try:
        raw = msgspec.json.decode(data)
        said = raw.get("schema") if isinstance(raw, dict) else None
        if said != SCHEMA:
            raise ConfigError(f"its schema is {said!r}, this version reads {SCHEMA!r}")
        return msgspec.convert(raw, Results)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
