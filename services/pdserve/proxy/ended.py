"""The one record of how a request ended, and the sink that logs it.

A sink neither blocks nor raises. A request that was refused before it was taken (validation, a full
queue when it came) has no record: its answer is all there is to it.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from pdserve.proxy.course import Course
from pdserve.proxy.trace import TraceContext
from pdserve.proxy.types import Finished, Mode, Sampling

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
    course: Course = field(default=Course(), compare=False)
    """When: not what makes two attempts the same."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one request."""

    request_id: str
    trace: TraceContext
    model: str
    chat: bool
    """A conversation; else a plain completion."""
    sampling: Sampling
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
    finish_reasons: tuple[str, ...]
    """Of the answers that are complete, in the order in which they were."""
    points: Mapping[int, int]
    """Monotonic nanoseconds by Point, up to the first byte; of the attempts, the one that gave it."""
    ended_ns: int
    """Monotonic: the client was told the end, or nothing more."""
    waited: bool = False
    """Its last attempt had failed, and it waited for other engines until the end."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.trace.trace_id


Sink = Callable[[Ended], None]
"""Takes the record of each request; see the module's contract."""


def all_of(*sinks: Sink) -> Sink:
    """One sink that tells them all, in this order."""

    def tell(ended: Ended) -> None:
        for sink in sinks:
            sink(ended)

    return tell


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
        attempts=[_attempt(tried) for tried in ended.attempts],
    )


def _attempt(tried: Tried) -> dict[str, str | int | None]:
    return {
        "prefill_engine_id": tried.prefill_engine_id,
        "decode_engine_id": tried.decode_engine_id,
        "transfer_id": tried.transfer_id,
        "mode": tried.mode.value if tried.mode else None,
        "tokens": tried.tokens,
        "reason": tried.reason,
        "error": tried.error,
        "blamed": tried.blamed,
    }
