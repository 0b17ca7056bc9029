"""Engines on accelerators whose KV lies in different ways, and what a hand-over between two of them must do.

How a side's KV lies is said twice: to kvd, as a layout with its division, and here, as a view of each rank's bytes with
the dimensions (layer, k or v, block, token, head, byte). What is expected comes from the views alone.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.types import Division, Layout, Part, Span

LAYERS = 3

Bytes = NDArray[np.uint8]


class Order(enum.Enum):
    """How the KV of a block lies."""

    TOKENS = "tokens"
    """Token after token: `[token][head][k v]`."""
    HEADS = "heads"
    """Head after head: `[head][token][k v]`."""
    APART = "apart"
    """`[token][head]`, all blocks' keys in front of all blocks' values."""


@dataclass(frozen=True)
class Side:
    """One engine. Each rank has a piece of device memory for each layer."""

    ranks: int = 1
    block_size: int = 16
    """Tokens."""
    blocks: int = 24
    order: Order = Order.TOKENS
    heads: int = 4
    """KV heads of the model; where there are fewer than ranks, neighbours hold the same."""
    each: int = 64
    """Bytes of the keys of a token and head, and of its values."""
    latent: bool = False
    """Keys and values are one, as in MLA."""

    @property
    def held(self) -> int:
        """Heads of a rank."""
        return max(1, self.heads // self.ranks)

    def first(self, rank: int) -> int:
        """The first of a rank's heads."""
        return rank * self.heads // self.ranks

    @property
    def pieces(self) -> list[int]:
        """Bytes of each piece of a rank."""
        return [self.blocks * self.block_size * self.held * 2 * self.each] * LAYERS

    def layout(self, rank: int) -> Layout:
        """As a rank tells kvd."""
        piece, each, held = self.pieces[0], self.each, self.held
        spans = 2 if self.order is Order.APART else 1
        length = piece // self.blocks // spans
        layers = [
            tuple(Span(layer * piece + at * (piece // spans), length, length) for at in range(spans))
            for layer in range(LAYERS)
        ]
        if self.order is Order.APART:
            parts = tuple(Part(name, at, 0, held * each, each, 1, 0, each) for at, name in enumerate("kv"))
        else:
            steps = {Order.TOKENS: held * 2 * each, Order.HEADS: 2 * each}[self.order]
            heads = {Order.TOKENS: 2 * each, Order.HEADS: self.block_size * 2 * each}[self.order]
            names = [("kv", 0, 2 * each)] if self.latent else [("k", 0, each), ("v", each, each)]
            parts = tuple(Part(name, 0, at, steps, heads, 1, 0, nbytes) for name, at, nbytes in names)
        division = Division(self.first(rank), held, self.heads, parts)
        return Layout(self.block_size, self.blocks, tuple(layers), division)

    @property
    def layouts(self) -> list[Layout]:
        """Of every rank."""
        return [self.layout(rank) for rank in range(self.ranks)]

    def view(self, memory: Bytes) -> Bytes:
        """A rank's bytes by layer, k or v, block, token, head and byte; writing to it writes to them."""
        layers, blocks, tokens, heads, each = LAYERS, self.blocks, self.block_size, self.held, self.each
        match self.order:
            case Order.TOKENS:
                return memory.reshape(layers, blocks, tokens, heads, 2, each).transpose(0, 4, 1, 2, 3, 5)
            case Order.HEADS:
                return memory.reshape(layers, blocks, heads, tokens, 2, each).transpose(0, 4, 1, 3, 2, 5)
            case Order.APART:
                return memory.reshape(layers, 2, blocks, tokens, heads, each)

    def prompt(self, memories: Sequence[Bytes], blocks: Sequence[int]) -> Bytes:
        """The KV of the tokens in these blocks, by layer, k or v, token, head of the model and byte. Ranks that hold
        the same head have the same bytes of it."""
        tokens = len(blocks) * self.block_size
        kv = np.zeros((LAYERS, 2, tokens, self.heads, self.each), np.uint8)
        for rank, memory in enumerate(memories):
            found = self.view(memory)[:, :, list(blocks)].reshape(LAYERS, 2, tokens, self.held, self.each)
            kv[:, :, :, self.first(rank) : self.first(rank) + self.held] = found
        return kv

    def put(self, memories: Sequence[Bytes], blocks: Sequence[int], first: int, kv: Bytes) -> None:
        """Writes the KV of a prompt's tokens, from that of block `first` on, into every rank: as far as it goes and
        these blocks have room."""
        for rank, memory in enumerate(memories):
            view, mine = self.view(memory), slice(self.first(rank), self.first(rank) + self.held)
            for number, block in enumerate(blocks):
                begin = (first + number) * self.block_size
                part = kv[:, :, begin : begin + self.block_size, mine]
                view[:, :, block, : part.shape[2]] = part


@dataclass(frozen=True)
class Case:
    """A hand-over of whole source blocks."""

    src: Side
    dst: Side
    ours: tuple[int, ...]
    """The source's blocks."""
    theirs: tuple[int, ...]
    """The destination's."""
    first: int = 0
    """Of the prompt's blocks, as the destination counts them, which the first of `theirs` is."""

    @property
    def moved(self) -> int:
        """Bytes that the destination takes, each rank what it holds."""
        size = self.dst.block_size
        tokens = len(self.ours) * self.src.block_size - self.first * size
        return min(tokens, len(self.theirs) * size) * LAYERS * self.dst.ranks * self.dst.held * 2 * self.dst.each

    def expected(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[Bytes]:
        """What the destination's ranks must hold afterwards, all of their bytes."""
        after = [target.copy() for target in targets]
        self.dst.put(after, self.theirs, self.first, self.src.prompt(sources, self.ours))
        return after


_SIX = (3, 4, 5, 17, 11, 0)
"""Neighbours, and others."""
CASES: dict[str, Case] = {
    "pools alone": Case(Side(2, order=Order.APART), Side(2, blocks=19, order=Order.APART), _SIX, (7, 2, 3, 4, 18), 1),
    "ranks 2 to 1": Case(Side(2), Side(1, blocks=19), _SIX, (7, 2, 3, 4, 18, 1)),
    "ranks 1 to 2": Case(Side(1, blocks=19), Side(2), _SIX, (7, 2, 3, 4, 18, 1)),
    "ranks 4 to 2, heads first": Case(Side(4, order=Order.HEADS), Side(2, 16, 9, Order.HEADS), (1, 2, 23), (8, 0, 1)),
    "blocks of 16 to 32": Case(Side(), Side(1, 32, 11), (*_SIX, 9), (4, 5, 10, 0)),
    "blocks of 32 to 16": Case(Side(1, 32, 11), Side(), (4, 5, 0), (3, 4, 9, 1, 22), 1),
    "blocks of 48 to 32": Case(Side(1, 48, 11), Side(1, 32), (4, 10, 0), (3, 4, 9, 1), 0),
    "joined to apart": Case(Side(), Side(order=Order.APART, blocks=7), _SIX, (6, 2, 3, 4, 0, 1)),
    "apart to joined": Case(Side(order=Order.APART), Side(blocks=21), _SIX, (6, 2, 3, 4, 0, 1)),
    "apart, heads of 16 bytes, to heads first": Case(
        Side(2, order=Order.APART, each=16), Side(1, 32, 5, Order.HEADS, each=16), (3, 4, 7, 8), (4, 0)
    ),
    "a latent on 2 ranks to 1": Case(
        Side(2, heads=1, each=288, latent=True), Side(1, 32, 5, heads=1, each=288, latent=True), (3, 4, 9), (4, 1)
    ),
    "a latent on 1 rank to 2": Case(
        Side(1, 32, 5, heads=1, each=288, latent=True), Side(2, heads=1, each=288, latent=True), (4, 1), (3, 4, 9), 1
    ),
    "more ranks than heads to 1": Case(Side(4, heads=2), Side(1, 48, 7, Order.APART, heads=2), (5, 6, 7, 1), (2, 6)),
    "1 to more ranks than heads": Case(Side(1, 48, 7, Order.APART, heads=2), Side(4, heads=2), (2, 6), (5, 6, 7, 1), 2),
    "everything": Case(Side(4, order=Order.HEADS), Side(2, 48, 7, Order.APART), (*_SIX, 20), (6, 2), 1),
}
