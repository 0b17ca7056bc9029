"""What prompts consist of: token ids that no cache has seen, or that share a prefix for a wanted hit rate. Pure.

Content comes from a seed of its own, not from that of lengths and arrivals: a second measurement of the same
workload on the same engines would else find every prompt in the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.workload.asks import Ask
from pdserve.rpc.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that one name of a trace's block stands for (the Mooncake traces' `hash_ids`)."""

_OWN, _STEM, _BLOCK = 0, 1, 2
"""Streams of one seed."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Ids that prompts are made of, both included.

    Raises:
        ConfigError: no id lies in it.
    """

    low: int = 100
    """The default range has no special token in byte-level BPE vocabularies and in the simulated engine's bytes."""
    high: int = 255

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"token ids from {self.low} to {self.high}: at least two, from 0 up")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Prompts begin with one of `groups` stems, so that a prefix cache finds `hit_rate` of all prompt tokens.

    Raises:
        ConfigError: a value that cannot be.
    """

    hit_rate: float
    """Wanted: cached tokens over prompt tokens, of the whole run, each group's first request included."""
    groups: int = 1
    """Stems; request i has stem i modulo `groups`."""
    block: int = 16
    """Tokens of a block: engines find whole ones, so stems are whole ones."""

    def __post_init__(self) -> None:
        if not 0 < self.hit_rate < 1:
            raise ConfigError(f"a hit rate of {self.hit_rate:g}: above 0 and below 1")
        if self.groups < 1 or self.block < 1:
            raise ConfigError("a prefix needs at least one group and blocks of at least one token")

    def shared(self, asks: Sequence[Ask]) -> list[int]:
        """How many tokens of each prompt are stem.

        The first request of a group cannot hit, so the others share more.

        Raises:
            ConfigError: too few requests for so high a rate, or prompts of unknown length.
        """
        part = self.hit_rate * len(asks) / max(len(asks) - self.groups, 1)
        if len(asks) <= self.groups or part >= 1:
            raise ConfigError(
                f"{len(asks)} requests in {self.groups} groups cannot reach a hit rate of {self.hit_rate:g}: "
                "each group's first one finds nothing"
            )
        counts = []
        for ask in asks:
            if ask.prompt_tokens is None or ask.blocks:
                raise ConfigError("a hit rate can be asked for only where the prompts are made here")
            blocks = round(part * ask.prompt_tokens / self.block)
            # The last token is always computed: a block that holds it is not found.
            counts.append(min(blocks, (ask.prompt_tokens - 1) // self.block) * self.block)
        return counts


class Prompts:
    """Makes the prompts of one workload, each when it is wanted: a whole workload's would fill the memory."""

    def __init__(
        self, asks: Sequence[Ask], content_seed: int, ids: TokenRange | None = None, sharing: Sharing | None = None
    ) -> None:
        """Raises ConfigError where `sharing` cannot be reached."""
        self._asks = asks
        self._seed = content_seed
        self._ids = ids or TokenRange()
        self._sharing = sharing
        self._shared = sharing.shared(asks) if sharing else [0] * len(asks)
        self._stems: dict[tuple[int, int], list[int]] = {}

    def make(self, index: int, run: int) -> str | list[int]:
        """The prompt of a request in run `run`; each run has content of its own, a data set's texts apart."""
        ask = self._asks[index]
        if ask.text is not None:
            return ask.text
        length = ask.prompt_tokens or 0
        if ask.blocks:
            tokens = [token for name in ask.blocks for token in self._tokens(TRACE_BLOCK, run, _BLOCK, name)]
            tokens = tokens[:length]
        else:
            tokens = self._stem(index, run)[: self._shared[index]]
        return tokens + self._tokens(length - len(tokens), run, _OWN, index)

    def fresh(self, length: int, serial: int) -> list[int]:
        """Tokens that are in no run: for what is sent before the first."""
        return self._tokens(length, -1, _OWN, serial)

    def _stem(self, index: int, run: int) -> list[int]:
        if self._sharing is None:
            return []
        group = index % self._sharing.groups
        if (run, group) not in self._stems:
            self._stems[run, group] = self._tokens(max(self._shared), run, _STEM, group)
        return self._stems[run, group]

    def _tokens(self, length: int, run: int, stream: int, number: int) -> list[int]:
        import numpy as np

        rng = np.random.default_rng([self._seed, run + 1, stream, number])
        tokens: list[int] = rng.integers(self._ids.low, self._ids.high + 1, max(length, 0)).tolist()
        return tokens
