"""The shape and speed of a simulated engine."""

import enum
from dataclasses import dataclass, fields, replace
from typing import Self

from pdserve.costmodel import INSTANT, CostModel
from pdserve.kvd.types import PROTOCOL
from pdserve.rpc.errors import ConfigError

WORD_BYTES = 8
"""KV is filled and checked in words of this size."""

BOS = 256
EOS = 257
VOCAB_SIZE = 258
"""Ids 0 to 255 are bytes."""

_MAY_BE_0 = ("eos_every", "kv_heads")


class KvOrder(enum.Enum):
    """How the KV of a block lies."""

    TOKENS = "tokens"
    """Token after token, of each its heads: `[token][head][k v]`."""
    HEADS = "heads"
    """Head after head: `[head][token][k v]`."""
    APART = "apart"
    """As TOKENS, keys and values in regions of their own."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A simulated engine; frozen for its life."""

    model: str = "sim"
    """Name that clients ask for; engines of unequal names do not exchange KV."""
    layers: int = 4
    """Attention layers, computed one after another."""
    ranks: int = 1
    """Tensor-parallel ranks, each with a region of its own."""
    kv_heads: int = 0
    """KV heads of the model, which the ranks divide among themselves; 0: one a rank. Where there are fewer than
    ranks, several ranks hold the same."""
    kv_order: KvOrder = KvOrder.TOKENS
    """How the KV of a block lies; engines of unequal orders exchange KV."""
    block_size: int = 16
    """Tokens per block."""
    num_blocks: int = 512
    """Blocks of the pool, the same on each rank."""
    block_bytes: int = 128
    """Bytes of one block in one layer on one rank: a multiple of 8 * block_size * the rank's heads."""
    max_model_len: int = 4096
    """Most tokens of prompt and answer together."""
    token_budget: int = 2048
    """Most tokens in one step; a longer prompt is computed in chunks."""
    max_seqs: int = 256
    """Most requests that run at once."""
    prefix_cache: bool = True
    """Whether blocks of finished requests are found again."""
    eos_every: int = 0
    """The model ends by itself at one position in so many; 0: never."""
    cost: CostModel = INSTANT
    """Time of a step."""
    fence_timeout: float = 10.0
    """Longest wait for a fence before the engine dies rather than overwrite, seconds."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a shape that cannot work."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not isinstance(value, bool) and field.name not in _MAY_BE_0 and value < 1:
                raise ConfigError(f"sim engine: {field.name} must be at least 1, not {value}")
        if self.eos_every < 0 or self.fence_timeout <= 0:
            raise ConfigError("sim engine: eos_every must not be negative, fence_timeout must be positive")
        if self.kv_heads < 0 or (self.all_heads % self.ranks and self.ranks % self.all_heads):
            raise ConfigError(f"sim engine: kv_heads ({self.kv_heads}) cannot be divided among {self.ranks} ranks")
        least = WORD_BYTES * self.block_size * self.heads
        if self.block_bytes % least:
            raise ConfigError(
                f"sim engine: block_bytes ({self.block_bytes}) must be a multiple of "
                f"{WORD_BYTES} * block_size * the rank's heads ({least})"
            )
        if self.kv_order is KvOrder.APART and self.head_words % 2:
            raise ConfigError(
                f"sim engine: kv_order apart needs block_bytes ({self.block_bytes}) in multiples of {2 * least}, "
                "half of them keys"
            )
        if self.max_model_len < 2:
            raise ConfigError("sim engine: max_model_len must hold a prompt token and an answer token")

    def with_(self, **changes: object) -> Self:
        """A copy with other values.

        Raises:
            ConfigError: an unknown name, or a shape that cannot work.
        """
        if unknown := sorted(set(changes) - {field.name for field in fields(self)}):
            raise ConfigError(f"sim engine: unknown settings {unknown}")
        return replace(self, **changes)  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def words(self) -> int:
        """Words of one token in one layer on one rank."""
        return self.block_bytes // self.block_size // WORD_BYTES

    @property
    def all_heads(self) -> int:
        """KV heads of the model."""
        return self.kv_heads or self.ranks

    @property
    def heads(self) -> int:
        """KV heads of one rank."""
        return max(1, self.all_heads // self.ranks)

    @property
    def head_words(self) -> int:
        """Words of one token in one layer of one head."""
        return self.words // self.heads

    def first_head(self, rank: int) -> int:
        """The first of a rank's KV heads; the ranks that hold the same head are neighbours."""
        return rank * self.heads if self.all_heads >= self.ranks else rank * self.all_heads // self.ranks

    @property
    def context(self) -> int:
        """Most tokens that one request can have: the model's or the pool's limit. The last token of an
        answer is never computed on, so its KV needs no place."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def identity(self) -> dict[str, str]:
        """What two sim engines must share to exchange KV."""
        return {
            "engine": "sim",
            "model": self.model,
            "layers": str(self.layers),
            "kv_heads": str(self.all_heads),
            "head_bytes": str(self.head_words * WORD_BYTES),
            "connector_protocol": str(PROTOCOL),
        }
