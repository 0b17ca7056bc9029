"""The one record of how a request ended, and the sink that logs it.

A sink neither blocks nor raises. A request that was refused before it was taken (validation, a full
queue when it came) has no record: its answer is all there is to it.
"""

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog

from pdserve.proxy.types import Finished, Mode

log = structlog.get_logger(__name__)


class Outcome(enum.Enum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt and how it ended."""

    prefill_engine_id: str
    """Empty: decode computed the prompt."""
    decode_engine_id: str
    transfer_id: str
    """32 hexadecimal digits; empty: nothing was to be handed over."""
    mode: Mode | None
    """None: nothing was to be handed over."""
    tokens: int
    """That the client got from it."""
    reason: str = ""
    """Empty: it gave all of the answer that was asked of it."""
    error: str = ""
    blamed: str = ""
    """The engine that the next attempt avoids."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one request."""

    request_id: str
    trace_id: str
    model: str
    outcome: Outcome
    reason: str
    """Of the error that the client got; empty where it got an answer."""
    error: str
    prompt_tokens: int
    completion_tokens: int
    """That the client got."""
    fallbacks: int
    """Attempts elsewhere before the first token."""
    continuations: int
    """Attempts elsewhere after it."""
    attempts: tuple[Tried, ...]
    """In order; none where it never got engines."""
    finished: Finished | None
    """What the client was told at the end; None where it got no whole answer."""


Sink = Callable[[Ended], None]
"""Takes the record of each request; see the module's contract."""


def to_log(ended: Ended) -> None:
    """The sink of a running proxy: one line a request."""
    say = log.warning if ended.outcome is Outcome.FAILED else log.info
    finished = ended.finished
    say(
        "request_ended",
        request_id=ended.request_id,
        trace_id=ended.trace_id,
        model=ended.model,
        outcome=ended.outcome.value,
        reason=ended.reason,
        error=ended.error,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        fallbacks=ended.fallbacks,
        continuations=ended.continuations,
        recomputed_tokens=finished.recomputed_tokens if finished else 0,
        ttft=finished.timings.ttft if finished else None,
        e2e=finished.timings.e2e if finished else None,
        attempts=[asdict(tried) | {"mode": tried.mode.value if tried.mode else None} for tried in ended.attempts],
    )
