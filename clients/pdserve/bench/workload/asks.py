"""One request of a workload before it is sent: lengths, and content where a file gives it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks for."""

    index: int
    """Its place in the workload, from 0."""
    prompt_tokens: int | None
    """Length of its prompt; None: a text whose tokens only the endpoint counts."""
    output_tokens: int
    """Length of its answer."""
    text: str | None = None
    """The prompt, where a data set gives it; else one is made of `prompt_tokens` tokens."""
    blocks: tuple[int, ...] = ()
    """Of a trace: names of the prompt's blocks; equal names are equal content."""
