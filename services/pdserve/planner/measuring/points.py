"""What one measurement of a running engine says. Values only."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prompt, alone on its engine."""

    tokens: int
    """Prompt tokens that were computed: those of a prefix cache are not among them."""
    seconds: float
    """From the engine's taking it into a step to the end of its last step."""
    steps: int = 1
    """Steps that it took: more than one where it is longer than the token budget."""


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Steps of a batch that only decodes."""

    seqs: int
    """Sequences that decoded."""
    context_tokens: float
    """Tokens of context, summed over them; the mean over the steps."""
    seconds: float
    """The median step."""


@dataclass(frozen=True, slots=True)
class MixedPoint:
    """A prompt that came while a batch decoded on the same engine."""

    tokens: int
    """Prompt tokens that were computed."""
    seqs: int
    """Sequences that decoded beside it."""
    context_tokens: float
    """Their tokens of context, summed."""
    seconds: float
    """All of the steps that computed the prompt."""
    steps: int = 1


@dataclass(frozen=True, slots=True)
class HandoverPoint:
    """The KV of one prompt, handed over with nothing else under way."""

    mode: Mode
    tokens: int
    """Tokens of the prompt whose KV was handed over."""
    kv_bytes: int
    """Bytes that landed."""
    serialization: float
    """Seconds from the end of prefill's forward pass to decode's having blocks; READ only, 0 in WRITE."""
    wait: float
    """Seconds from then to decode's taking the request into a step: the bytes, and the news of them. WRITE: what of
    it was left when prefill had ended."""
    copy_seconds: float
    """Spent copying, summed over operations."""
    layers: int
    transport: str
    """What moved the bytes, by name."""


@dataclass(frozen=True, slots=True)
class EdgePoint:
    """What one request's time to first token lost before its first engine and after its last step."""

    dispatch: float
    """Seconds from the proxy's receipt to the first engine's step: the engine had nothing else to do."""
    egress: float
    """Seconds from the first token's step to the client."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured of one deployment."""

    model: str
    """As the deployment calls it."""
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    mixed: tuple[MixedPoint, ...]
    """Empty: there was no engine that serves whole requests."""
    handovers: tuple[HandoverPoint, ...]
    """Empty: there was no pair."""
    edges: tuple[EdgePoint, ...]
    kv_tokens: int
    """KV tokens of the smallest pool among the engines that decode."""
    prefill_kv_tokens: int
    """The same of the engines that compute prompts."""
    max_model_len: int
    """Longest prompt and answer together."""
    token_budget: int | None
    """Most tokens in a step, where it was told; None: every prompt was taken to be one step."""
    broke_off: str = ""
    """Why it ended before all was measured, in words; empty: it did not."""
