"""Engines whose KV lies in many ways, and what a copy between two of them must do, byte by byte and without numpy's
tricks."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.kvd.types import Division, Layout, Part, Span

Memory = NDArray[np.uint8]


@dataclass(frozen=True)
class Content:
    """What both engines of a pair share: the model's heads, and what a step of one head is made of."""

    heads: int
    layers: int
    step: int
    parts: tuple[tuple[str, int, int], ...]
    """Name, units and bytes of a unit; where `step` is 1 only their product counts."""


@dataclass(frozen=True)
class Side:
    """One engine: a layout and a size for each rank."""

    layouts: tuple[Layout, ...]
    sizes: tuple[int, ...]

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.layouts[0].block_size

    @property
    def num_blocks(self) -> int:
        """Of each rank."""
        return self.layouts[0].num_blocks


def address(layout: Layout, part: Part, layer: int, block: int, step: int, head: int, byte: int) -> int:
    """Where one byte of one step of one head of the model lies in a rank's region, as types.Part says."""
    assert layout.division is not None
    unit, within = divmod(byte, part.unit_bytes)
    span = layout.layers[layer][part.span]
    inside = part.offset + step * part.step_stride + (head - layout.division.first_head) * part.head_stride
    return span.offset + block * span.stride + inside + unit * part.unit_stride + within


def value(part: str, layer: int, step: int, head: int, byte: int) -> int:
    """What a byte of a prompt's KV is: nearly never the same in two places."""
    seed = 5 * sum(map(ord, part)) + 53 * layer + 131 * step + 17 * head + 29 * byte + 3 * step * head
    return seed * 2654435761 >> 16 & 0xFF


def place(side: Side, memories: list[Memory], blocks: list[int], steps: range) -> None:
    """Writes the KV of some steps of a prompt, which lies in these blocks, into every rank."""
    for layout, memory in zip(side.layouts, memories, strict=True):
        division = layout.division
        assert division is not None
        per_block = layout.block_size // division.step
        for layer in range(len(layout.layers)):
            for part in division.parts:
                for step in steps:
                    block, inside = blocks[step // per_block], step % per_block
                    for head in range(division.first_head, division.first_head + division.heads):
                        for byte in range(part.units * part.unit_bytes):
                            at = address(layout, part, layer, block, inside, head, byte)
                            memory[at] = value(part.name, layer, step, head, byte)


def _held(heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and number: as vLLM gives them."""
    return rank * heads // ranks, max(1, heads // ranks)


@st.composite
def sides(draw: st.DrawFn, content: Content) -> Side:
    """An engine with this content: any rank count that divides the heads or is a multiple of them, any order."""
    counts = [r for r in (1, 2, 3, 4, 6) if content.heads % r == 0 or r % content.heads == 0]
    ranks = draw(st.sampled_from(counts))
    block_size = content.step * draw(st.sampled_from([1, 2, 3, 4]))
    num_blocks = draw(st.integers(4, 7))
    order = draw(st.sampled_from(["tokens", "heads", "apart", "columns"]))
    gap = draw(st.sampled_from([0, 0, 5]))
    together = draw(st.booleans())
    made = [
        _rank(content, block_size, num_blocks, order, gap, together, *_held(content.heads, ranks, r))
        for r in range(ranks)
    ]
    return Side(tuple(layout for layout, _ in made), tuple(size for _, size in made))


def _rank(
    content: Content, block_size: int, num_blocks: int, order: str, gap: int, together: bool, first: int, heads: int
) -> tuple[Layout, int]:
    steps = block_size // content.step
    sizes = [units * nbytes for _, units, nbytes in content.parts]
    whole = sum(sizes)
    parts: list[Part] = []
    lengths = [steps * heads * whole]
    if order == "apart":
        lengths = [steps * heads * size for size in sizes]
        for at, (name, units, nbytes) in enumerate(content.parts):
            parts.append(Part(name, at, 0, heads * sizes[at], sizes[at], units, nbytes, nbytes))
    elif order == "columns":  # of each head first one part of all steps, unit by unit, then the other
        start = 0
        for at, (name, units, nbytes) in enumerate(content.parts):
            count, unit = (units, nbytes) if content.step > 1 else (sizes[at], 1)
            parts.append(Part(name, 0, start, unit, steps * whole, count, steps * unit, unit))
            start += steps * sizes[at]
    else:
        by_step, by_head = (heads * whole, whole) if order == "tokens" else (whole, steps * whole)
        start = 0
        for at, (name, units, nbytes) in enumerate(content.parts):
            parts.append(Part(name, 0, start, by_step, by_head, units, nbytes, nbytes))
            start += sizes[at]
    division = Division(first, heads, content.heads, tuple(parts), content.step)
    layers, at = [], 3
    stride = content.layers * sum(lengths) + gap
    for _ in range(content.layers):
        spans = []
        for length in lengths:
            spans.append(Span(at, stride if together else length + gap, length))
            at += length if together else (length + gap) * num_blocks
        layers.append(tuple(spans))
    size = 3 + stride * num_blocks if together else at
    return Layout(block_size, num_blocks, tuple(layers), division), size


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Heads and bytes: K and V, or one latent; plain, or in tiles of a few tokens."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    layers = draw(st.integers(1, 2))
    step = draw(st.sampled_from([1, 1, 1, 2]))
    if draw(st.booleans()):
        return Content(heads, layers, step, (("k", 1, 4), ("v", 1, 4)))
    if draw(st.booleans()):
        return Content(heads, layers, step, (("k", 2, 3), ("v", 1, 8)))
    return Content(1, layers, step, (("kv", 1, 6),))
