"""What the services need of an engine, whichever it is.

Contracts:
- `generate` raises a typed error before its first output for what it can refuse at once, and ends
  with exactly one output that has a finish reason, or with a typed error.
- Closing the iterator early (`aclose`) aborts the request: its blocks come back, except those that
  a hand-over still holds, which come back with that hand-over's end.
- `request_id` is unique within the engine's life.
"""

import enum
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.kvd.types import Locator, Mode


class Finish(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; None leaves the engine's default."""

    max_tokens: int | None = None
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
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Produce:
    """Hold the prompt's blocks for a transfer once they are computed."""

    transfer_id: bytes
    mode: Mode
    consumers: int = 1
    peer_locator: bytes = b""


@dataclass(frozen=True, slots=True)
class Consume:
    """Take the prompt's KV from a transfer instead of computing it."""

    transfer_id: bytes
    mode: Mode
    consumer: int = 0
    """Which of the transfer's consumers, from 0."""
    ticket: bytes = b""
    """READ: signed."""
    peer_locator: bytes = b""
    """WRITE: signed."""
    recompute: bool = False
    """Compute the prompt here when the hand-over fails; else the request fails with its reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, one answer."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    kv: Produce | Consume | None = None
    """None: served by this engine alone."""


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
class EngineTimes:
    """Monotonic nanoseconds of one request inside the engine; 0 where not known."""

    scheduled_ns: int = 0
    """First scheduled to compute (after the KV wait, for a consumer)."""
    first_token_ns: int = 0
    """First token sampled: for a producer, the end of its forward pass."""
    last_chunk_ns: int = 0
    """Of a WRITE producer: the step that computes its prompt's last chunk was about to begin."""


@dataclass(frozen=True, slots=True)
class Output:
    """What is new since the last output."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Position, ...] = ()
    finish: Finish | None = None
    stop_reason: str = ""
    """The stop string, or the stop token's id in digits."""
    cached_tokens: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    recomputed_tokens: int = 0
    """Of a consumer: prompt tokens that this engine computed itself."""
    offered_tokens: int = 0
    """Of a producer's last output: prompt tokens on offer; 0 where nothing is."""
    offered_blocks: int = 0
    times: EngineTimes = field(default_factory=EngineTimes)


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has to do, for routing."""

    free_kv_tokens: int
    total_kv_tokens: int
    running: int
    waiting: int
    steps: int
    """Steps since start; one that stands still while work waits means a stuck engine."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is; fixed for its life."""

    engine_id: str
    model: str
    """Name that clients ask for."""
    tokenizer: str
    """A folder with tokenizer.json, or "bytes"."""
    max_model_len: int
    block_size: int
    num_blocks: int
    ranks: int
    identity: Mapping[str, str]
    """What a peer must share to exchange KV; see pdserve.kvd.types.Identity."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    layout: str = ""
    """How its KV lies, in words; engines of unequal layouts may exchange KV."""

    def locator(self, kvd_address: str) -> Locator:
        """Where peers reach this engine's KV."""
        return Locator(self.engine_id, kvd_address, dict(self.identity), self.layout)


class Engine(Protocol):
    """A running model instance."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs one request; see the module's contracts.

        Raises:
            InvalidRequest: parameters that the engine refuses.
            PoolExceeded: the prompt needs more blocks than the pool has.
            TransferFailed: a hand-over failed and recomputing was not allowed.
            EngineDied: the engine has ended.
        """
        ...

    def load(self) -> Load:
        """The load now; never blocks."""
        ...

    async def failed(self) -> str:
        """Returns, with the reason, only when the engine has died."""
        ...

    async def aclose(self) -> None:
        """Ends the engine and frees its memory; safe twice."""
        ...
