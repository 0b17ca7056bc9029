"""What goes into a call and what comes out of it. Values only; no gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

Mode = Literal["read", "write"]
"""How the prompt's KV cache gets from prefill to decode: pulled when prefill has ended, or pushed while it runs."""

Route = Literal["split", "split_or_colocated", "colocated"]
"""Which engines may answer: a prefill and decode pair, a pair or else one engine, or one engine."""

FailurePolicy = Literal["fail", "recompute"]
"""What happens when a hand-over fails: a typed error, or the prompt is computed again at decode."""

FinishReason = Literal["stop", "length"]
"""A stop token, stop string or end of sequence; or max_tokens or the context's end."""

Role = Literal["prefill", "decode", "both", "unknown"]
"""What an engine is tuned for."""


class SamplingFields(TypedDict, total=False):
    """The fields of `Sampling`, as the keyword arguments that every generating call takes."""

    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    n: int
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; None leaves the model's or OpenAI's default."""

    max_tokens: int | None = None
    """Most tokens to generate, at least 1; None: up to the context's end."""
    min_tokens: int = 0
    """Fewest tokens before a stop is honoured."""
    temperature: float | None = None
    """0 is greedy; None is 1."""
    top_p: float | None = None
    """Nucleus mass in (0, 1]; None is 1."""
    top_k: int | None = None
    """Candidates kept; None or 0 keeps all."""
    presence_penalty: float = 0.0
    """In [-2, 2]."""
    frequency_penalty: float = 0.0
    """In [-2, 2]."""
    repetition_penalty: float | None = None
    """Above 0; None is 1, which does nothing."""
    seed: int | None = None
    """Same seed, same engine, same answer."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Do not end at the model's end of sequence."""
    n: int = 1
    """Answers per prompt."""
    logprobs: int | None = None
    """Log probabilities of the sampled token and of this many best at each position; None: none."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `{"role": ..., "content": ...}` does as well."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate of one position."""

    token_id: int
    token: str
    logprob: float
    """Natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The sampled token of one position and the best candidates beside it."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """Best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one of the n answers."""

    index: int
    """Which answer, from 0."""
    text: str
    """May be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token, where asked for."""
    finish_reason: FinishReason | None = None
    """Set on the answer's last delta."""
    stop_reason: str = ""
    """The stop string, or the stop token's id in digits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in a prefix cache (prefill's, where there was a prefill)."""
    completion_tokens: int
    """Over all n answers."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, as the proxy measured it; seconds."""

    ttft_seconds: float
    """Request received to first token written."""
    parts: Mapping[str, float]
    """Disjoint parts of it, in order."""
    unattributed_seconds: float
    """What no stamp explains; with the parts it sums to `ttft_seconds`."""
    e2e_seconds: float
    """Request received to last token written."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the hand-over really did."""

    kv_bytes: int
    """Bytes that landed at decode, over all layers and ranks."""
    blocks: int
    """Per layer and rank."""
    layers: int
    ranks: int
    transport: str
    """What moved the bytes, by name."""
    copy_seconds: float
    """Time spent copying, summed over operations."""
    span_seconds: float
    """First operation posted to last byte landed."""
    overlapped_bytes: int
    """Bytes that had landed before prefill was done."""
    lanes: str = ""
    """What the transport moved them over, in its own words, as "tcp/eth0 (software emulation)"; empty where it has no
    choice, or does not tell."""

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes over time spent copying, 10^9 bytes; 0 where nothing was copied."""
        return self.kv_bytes / self.copy_seconds / 1e9 if self.copy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: str
    trace_id: str
    """W3C trace id, 32 hexadecimal digits."""
    model: str
    choices: tuple[Choice, ...]
    """n of them, by index."""
    usage: Usage
    timings: Timings
    mode: Mode | None
    """The mode that was really used; None: answered by one engine alone."""
    transfer: Transfer | None
    """None where nothing was handed over."""
    recomputed_tokens: int
    """Prompt tokens that decode computed itself."""
    fallbacks: int
    """Times the request left the path it began on, before its first token."""
    prefill_engine_id: str
    """Empty for a colocated answer."""
    decode_engine_id: str
    continuations: int = 0
    """Times other engines took the answer up after its first token."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.choices[0].token_ids

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache that were handed over."""
        return self.transfer.kv_bytes if self.transfer else 0

    @property
    def transport(self) -> str:
        """What moved them, by name; empty where nothing was handed over."""
        return self.transfer.transport if self.transfer else ""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for now."""

    id: str
    max_model_len: int
    """Longest prompt and answer together, tokens."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine behind the proxy."""

    engine_id: str
    role: Role
    model: str
    address: str
    state: str
    """ "ready", "draining", "foreign" or "suspect"."""
    free_kv_tokens: int
    total_kv_tokens: int
    running: int
    waiting: int
    beat_age_seconds: float
    """Since its last beat."""
    excluded_because: str
    """Why the proxy does not route to it; empty when it does."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The engines behind a proxy, and what it is doing."""

    engines: tuple[Engine, ...]
    default_mode: Mode | None
    queued: int
    """Requests that wait for room."""
    in_flight: int
    """Requests dispatched and not ended."""
