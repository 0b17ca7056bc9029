"""The nouns of the proxy. Values only: no I/O, no clock, no wire."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Mode(enum.Enum):
    """How KV gets from prefill to decode."""

    READ = "read"
    """Serial: decode pulls after prefill has ended."""
    WRITE = "write"
    """Concurrent: prefill pushes layer by layer while it computes."""


class Role(enum.Enum):
    """What an engine is tuned for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Serves whole requests by itself (colocated)."""


class Route(enum.Enum):
    """Which engines may serve a request."""

    SPLIT = "split"
    """A prefill and a decode engine; an error where there is no pair."""
    SPLIT_OR_COLOCATED = "split_or_colocated"
    """A pair, or a colocated engine where there is no pair."""
    COLOCATED = "colocated"
    """A colocated engine."""


class OnFailure(enum.Enum):
    """What to do when a hand-over fails."""

    FAIL = "fail"
    """End the request with the error."""
    RECOMPUTE = "recompute"
    """Try another prefill engine, then compute the prompt at decode."""


class Finish(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; None leaves the model's default."""

    max_tokens: int | None = None
    """None: up to the context's end."""
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """The sampled token's and this many best candidates' log probabilities; None: none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's template."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenised already."""

    ids: tuple[int, ...]


Prompt = str | Chat | TokenIds


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for, as either face decoded it; not validated."""

    prompt: Prompt
    request_id: str = ""
    """Empty: the proxy makes one."""
    model: str = ""
    """Empty: the one model that there is."""
    sampling: Sampling = field(default_factory=Sampling)
    mode: Mode | None = None
    """None, here and below: the deployment's default."""
    route: Route | None = None
    on_failure: OnFailure | None = None
    timeout: float | None = None
    """Seconds that the client will wait; None: as long as the deployment allows."""
    traceparent: str = ""
    """W3C trace context of the caller; empty: a new trace."""


@dataclass(frozen=True, slots=True)
class EngineCard:
    """What a registered engine is; all but the locator is fixed for its life."""

    engine_id: str
    role: Role
    model: str
    tokenizer: str
    address: str
    """gRPC target of its service."""
    locator: bytes
    """Signed; renewed with each beat; for the other leg, unread."""
    identity: tuple[tuple[str, str], ...]
    """Names and values, sorted; equal for engines that may exchange KV."""
    max_model_len: int
    block_size: int
    total_kv_tokens: int
    vocab_size: int = 0
    """Token ids are below it; 0: not known."""
    layout: str = ""
    """How its KV lies, in words."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """Moments that one process measured: CLOCK_MONOTONIC nanoseconds by cut point's number."""

    boot_id: str = ""
    at: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """What a hand-over really did; fields as in pdserve.api.common.v1.TransferFacts."""

    kv_bytes: int = 0
    blocks: int = 0
    layers: int = 0
    ranks: int = 0
    copy_ns: int = 0
    transport: str = ""
    first_post_ns: int = 0
    landed_ns: int = 0
    overlapped_bytes: int = 0
    offered_ns: int = 0
    accepted_ns: int = 0
    last_byte_ns: int = 0
    lanes: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a call to a service had come when it failed; see common.v1.Progress."""

    stamps: Stamps
    unseen: frozenset[int]
    """Points that may have been passed without the service's knowing; others without a stamp were not reached."""
    ended_ns: int
    """On the service's clock; 0: not known."""
    facts: TransferFacts | None = None
    """What kvd has said of the hand-over, where it has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token of one position, with its natural log probability."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Position:
    """Log probabilities of one position."""

    sampled: Candidate
    top: tuple[Candidate, ...]
    """Best first."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was taken."""

    request_id: str
    trace_id: str
    model: str
    mode: Mode | None
    """None: colocated."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one of the n answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...] = ()
    finish: Finish | None = None
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, found in a prefix cache (prefill's, where there was a prefill)."""
    completion_tokens: int
    """Over all n answers."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time to first token went; seconds."""

    ttft: float
    parts: Mapping[str, float]
    """Disjoint, in order."""
    unattributed: float
    """What no stamp explains; it and the parts sum to ttft."""
    e2e: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    usage: Usage
    timings: Timings
    transfer: TransferFacts | None
    """None: nothing was handed over, or decode was lost behind the last token, before it could say."""
    mode: Mode | None
    """Mode that was really used; None: nothing was handed over."""
    recomputed_tokens: int
    """Prompt tokens that decode computed itself although a hand-over was meant."""
    fallbacks: int
    """Times the request left the path it began on, before its first token."""
    continuations: int
    """Times the answer was taken up by other engines, after its first token."""
    prefill_engine_id: str
    """Of those that ended the answer, as all of the hand-over's facts; empty: no prefill leg."""
    decode_engine_id: str


Event = Started | Delta | Finished
