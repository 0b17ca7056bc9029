"""What the proxy needs of the services: two kinds of leg, each a stream of typed events.

Contracts, of both kinds:
- opening never blocks and never raises; a leg that cannot be reached fails at the first `receive`.
- `receive` gives the next event, None once the leg has ended well, or raises a typed error. It is
  awaited by one task at a time.
- `progress` is how far the call had come, once `receive` has raised because the service failed it; None where the
  service has said nothing of that: it is gone, or was not waited for.
- `cancel(error)` ends the leg at once, from anywhere; safe twice, and after the end. A `receive`
  that waits raises that error. The service gives everything back that the leg held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pdserve.proxy.types import Delta, EngineCard, Mode, Progress, Sampling, Stamps, TransferFacts
from pdserve.rpc.errors import PdserveError

E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Compute a prompt and hold its KV for a transfer."""

    request_id: str
    transfer_id: bytes
    mode: Mode
    prompt: Sequence[int]
    sampling: Sampling
    peer_locator: bytes
    """Of the decode engine."""
    consumers: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt is computed and on offer."""

    ticket: bytes
    first_token_id: int
    cached_tokens: int
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class Released:
    """Every consumer has what it needs; prefill's blocks are free."""

    facts: TransferFacts | None


PrefillEvent = Ready | Released


@dataclass(frozen=True, slots=True)
class Source:
    """Where decode takes a prompt's KV from."""

    transfer_id: bytes
    mode: Mode
    ticket: bytes = b""
    """READ: what `Ready` carried."""
    peer_locator: bytes = b""
    """WRITE: of the prefill engine."""


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Answer a prompt."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    source: Source | None
    """None: compute the prompt."""
    recompute: bool = False
    """Compute the prompt at decode, for those of several answers whose hand-over fails."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one answer."""

    delta: Delta
    stamps: Stamps | None = None
    """With the request's first token."""


@dataclass(frozen=True, slots=True)
class Done:
    """All answers are complete."""

    completion_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    facts: TransferFacts | None = field(default=None)


DecodeEvent = Tokens | Done


class Leg(Protocol[E_co]):
    """One open call to a service."""

    @property
    def progress(self) -> Progress | None:
        """How far it had come when it failed; see the module's contracts."""
        ...

    async def receive(self) -> E_co | None:
        """The next event; see the module's contracts."""
        ...

    def cancel(self, error: PdserveError) -> None:
        """Ends it; see the module's contracts."""
        ...


class Legs(Protocol):
    """Opens legs."""

    def prefill(self, engine: EngineCard, order: PrefillOrder, traceparent: str, timeout: float) -> Leg[PrefillEvent]:
        """Begins to compute a prompt; the leg ends with DEADLINE_EXCEEDED after `timeout` seconds."""
        ...

    def decode(self, engine: EngineCard, order: DecodeOrder, traceparent: str, timeout: float) -> Leg[DecodeEvent]:
        """Begins to answer; the leg ends with DEADLINE_EXCEEDED after `timeout` seconds."""
        ...
