"""What is asked of the decode service and what it answers, as values."""

from dataclasses import dataclass

from pdserve.engine.hosting.stamps import Stamps
from pdserve.engine.port import Finish, Position, Sampling
from pdserve.kvd.client.messages import Facts
from pdserve.kvd.types import Mode


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV comes from."""

    transfer_id: bytes
    mode: Mode
    ticket: bytes = b""
    """READ: signed."""
    peer_locator: bytes = b""
    """WRITE: signed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to answer."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    answers: int
    source: Source | None
    """None: this engine computes the prompt itself."""
    recompute: bool | None
    """Whether to compute the prompt here when the hand-over fails; None: as the service is configured."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...]
    finish: Finish | None
    stop_reason: str
    stamps: Stamps | None
    """With the first token of the request."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All answers have ended."""

    completion_tokens: int
    """Over all answers."""
    cached_tokens: int
    """Of the prompt, in this engine's own prefix cache: the best of the answers."""
    recomputed_tokens: int
    """Over all answers."""
    facts: Facts | None
    """Over all answers; None where nothing landed."""
