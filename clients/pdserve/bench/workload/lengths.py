"""How long prompts and answers are: fixed, or drawn evenly from a range. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.bench.workload.asks import Ask
from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths from `low` to `high`, both included, in tokens.

    Raises:
        ConfigError: no length lies in it, or one below 1.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"lengths of {self}: from at least 1 up")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_span(text: str) -> Span:
    """`2000`, or `1000-3000`.

    Raises:
        ConfigError: it is neither.
    """
    low, dash, high = text.partition("-")
    try:
        return Span(int(low), int(high if dash else low))
    except ValueError:
        raise ConfigError(f"{text!r} is no length: a number of tokens, or a range such as 1000-3000") from None


def draw(prompt: Span, output: Span, count: int, rng: "np.random.Generator") -> list[Ask]:
    """`count` requests; a fixed length draws nothing.

    Raises:
        ConfigError: no request.
    """
    if count < 1:
        raise ConfigError(f"{count} requests: there must be at least one")
    columns = [
        [span.low] * count if span.low == span.high else rng.integers(span.low, span.high + 1, count).tolist()
        for span in (prompt, output)
    ]
    return [Ask(index, *pair) for index, pair in enumerate(zip(*columns, strict=True))]
