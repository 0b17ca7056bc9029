"""Where the KV of a simulated engine lies. Pure."""

from collections.abc import Sequence

from pdserve.engine.sim.config import WORD_BYTES, KvOrder, SimConfig
from pdserve.engine.sim.content import Words
from pdserve.kvd.types import Division, Layout, Part, Span


def layout_of(config: SimConfig, rank: int) -> Layout:
    """The layout of a rank: one layer after another."""
    parts = 2 if config.kv_order is KvOrder.APART else 1
    length = config.block_bytes // parts
    step = config.num_blocks * length
    layers = tuple(
        tuple(Span((layer * parts + part) * step, length, length) for part in range(parts))
        for layer in range(config.layers)
    )
    division = Division(config.first_head(rank), config.heads, config.all_heads, _parts(config))
    return Layout(config.block_size, config.num_blocks, layers, division)


def _parts(config: SimConfig) -> tuple[Part, ...]:
    whole = config.head_words * WORD_BYTES
    half = whole // 2
    if config.kv_order is KvOrder.APART:
        return tuple(Part(name, at, 0, config.heads * half, half, 1, 0, half) for at, name in enumerate("kv"))
    by_token, by_head = config.heads * whole, whole
    if config.kv_order is KvOrder.HEADS:
        by_token, by_head = whole, config.block_size * whole
    if config.head_words % 2:
        return (Part("kv", 0, 0, by_token, by_head, 1, 0, whole),)
    return tuple(Part(name, 0, at * half, by_token, by_head, 1, 0, half) for at, name in enumerate("kv"))


def views_of(config: SimConfig, words: Words) -> Sequence[Words]:
    """A rank's memory as arrays of shape (layers, blocks, tokens, heads, words); side by side, along their last
    dimension, they hold the words of each head in order."""
    layers, blocks, tokens, heads, each = (
        config.layers,
        config.num_blocks,
        config.block_size,
        config.heads,
        config.head_words,
    )
    match config.kv_order:
        case KvOrder.TOKENS:
            return [words.reshape(layers, blocks, tokens, heads, each)]
        case KvOrder.HEADS:
            return [words.reshape(layers, blocks, heads, tokens, each).transpose(0, 1, 3, 2, 4)]
        case KvOrder.APART:
            apart = words.reshape(layers, 2, blocks, tokens, heads, each // 2)
            return [apart[:, 0], apart[:, 1]]
