"""Steps of one engine that are taken together, what their end brings, and what they add up to. Values only."""

from dataclasses import dataclass, field

from pdserve.planner.simulator.requests import Sequence


@dataclass(slots=True)
class Run:
    """Steps under way, all of the same sequences."""

    start: float
    """Seconds."""
    ends: list[float]
    """Of each step planned, seconds."""
    steps: int
    """How many of them are taken."""
    chunks: list[tuple[Sequence, int]]
    """Prompts and how many of their tokens; then there is one step."""
    decoding: int
    """Sequences that decode."""


@dataclass(slots=True)
class Ended:
    """What the end of a run brings."""

    produced: list[Sequence] = field(default_factory=list)
    """Prompts that are computed for another engine; their memory stays taken."""
    finished: list[Sequence] = field(default_factory=list)
    """Answers that are complete; their memory is free."""


@dataclass(slots=True)
class Spent:
    """What an engine did."""

    prefill: float = 0.0
    """Seconds of steps with prompts alone."""
    decode: float = 0.0
    """Seconds of steps that only decode."""
    mixed: float = 0.0
    """Seconds of steps with both."""
    steps: int = 0
    """All steps."""
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputed ones too."""
    decode_tokens: int = 0
    """Tokens decoded."""
    kv_high: int = 0
    """Most KV tokens held at once."""
    preemptions: int = 0
    """Sequences put back for want of memory."""
