"""How a block of vLLM's KV divides among tokens and KV heads. Pure: numbers in, numbers out.

vLLM names the dimensions of a layer's tensor (blocks, heads, tokens, content), whatever their order in memory, or
(2, blocks, tokens, heads, content) where K and V lie apart. On CPU the attention kernel uses the bytes of each head of
a block as it likes; `PACKINGS` has what it does with them, which a test compares with the kernel itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdserve.engine.vllm.layout import TensorShape
from pdserve.kvd.types import Division, Layout, Part

PLAIN: Final = "plain"
"""The packing of kernels that keep a token's content together, as vLLM's shapes say."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the model and the kernel say about one rank's heads."""

    rank: int
    ranks: int
    heads: int
    """KV heads of the rank."""
    total_heads: int
    """KV heads of the model; 1 for a latent, which each rank has whole."""
    head_size: int
    """Elements of K, and of V, of one token and head; of a latent, of both as one."""
    latent: bool
    """MLA."""
    packing: str
    """PLAIN, or how the CPU kernel packs: vLLM's name of its instruction set."""

    @property
    def first_head(self) -> int:
        """vLLM gives ranks their heads in order; where there are more ranks than heads, neighbours hold the same."""
        return self.rank * self.total_heads // self.ranks


Packing = Callable[[int, int, int], tuple[int, tuple[Part, ...]]]
"""(tokens of a block, elements of a head, bytes of an element) -> tokens that lie together, and K and V of head 0."""


def divided(layout: Layout, tensors: Sequence[TensorShape], facts: HeadFacts) -> Layout:
    """The layout with its division, where that is known. `tensors`: one for each layer."""
    first = tensors[0]
    if any((t.shape, t.stride, t.itemsize) != (first.shape, first.stride, first.itemsize) for t in tensors):
        return layout
    found = _parts(layout, first, facts)
    if found is None:
        return layout
    step, parts = found
    division = Division(facts.first_head, facts.heads, facts.total_heads, parts, step)
    return msgspec.structs.replace(layout, division=division)


def _parts(layout: Layout, tensor: TensorShape, facts: HeadFacts) -> tuple[int, tuple[Part, ...]] | None:
    blocks, tokens, heads, size = layout.num_blocks, layout.block_size, facts.heads, facts.head_size
    if heads == tokens:
        return None  # their dimensions cannot be told apart by their sizes
    width = size if facts.latent else 2 * size
    strides = [stride * tensor.itemsize for stride in tensor.stride]
    shape: tuple[int, ...] = tensor.shape
    if facts.latent and shape == (blocks, tokens, width):
        shape, strides = (blocks, 1, tokens, width), [strides[0], strides[0], *strides[1:]]
    if shape == (blocks, heads, tokens, width) and tensor.stride[-1] == 1:
        if facts.packing != PLAIN:
            return _packed(strides, tokens, facts, tensor.itemsize)
        if len(layout.layers[0]) != 1:
            return None  # the heads of a block lie apart, and which span has which is not told
        _, by_head, by_token, _ = strides
        content = size * tensor.itemsize
        names = ("kv",) if facts.latent else ("k", "v")
        return 1, tuple(Part(name, 0, at * content, by_token, by_head, 1, 0, content) for at, name in enumerate(names))
    if shape == (2, blocks, tokens, heads, size) and tensor.stride[-1] == 1 and facts.packing == PLAIN:
        apart, _, by_token, by_head, _ = strides
        content = size * tensor.itemsize
        spans = (0, 1) if len(layout.layers[0]) == 2 else (0, 0)  # where a block has both, V lies behind K
        return 1, tuple(
            Part(name, spans[at], 0 if spans[at] == at else apart, by_token, by_head, 1, 0, content)
            for at, name in enumerate("kv")
        )
    return None


def _packed(
    strides: Sequence[int], tokens: int, facts: HeadFacts, itemsize: int
) -> tuple[int, tuple[Part, ...]] | None:
    packing = PACKINGS.get(facts.packing)
    slab = 2 * tokens * facts.head_size * itemsize
    if packing is None or itemsize < 2 or strides[1] != slab or strides[2] * tokens != slab:
        return None  # itemsize 1 is fp8, which the kernels pack in ways of their own
    step, parts = packing(tokens, facts.head_size, itemsize)
    if tokens % step:
        return None
    return step, tuple(msgspec.structs.replace(part, head_stride=slab) for part in parts)


def _columns(tokens: int, size: int, itemsize: int) -> tuple[int, tuple[Part, ...]]:
    """K transposed, `[size][tokens]`, then V, `[tokens][size]`."""
    row = size * itemsize
    return 1, (
        Part("k", 0, 0, itemsize, 0, size, tokens * itemsize, itemsize),
        Part("v", 0, tokens * row, row, 0, 1, 0, row),
    )


def _tiles(tokens: int, size: int, itemsize: int) -> tuple[int, tuple[Part, ...]]:
    """K in tiles of 32 tokens, each with all of the head; then V in tiles of 32 tokens and 16 elements,
    `[size / 16][tokens / 32]`."""
    step, wide = 32, 16
    row, tile = size * itemsize, step * wide * itemsize
    return step, (
        Part("k", 0, 0, step * row, 0, 1, 0, step * row),
        Part("v", 0, tokens * row, tile, 0, size // wide, tokens * wide * itemsize, tile),
    )


PACKINGS: Final[Mapping[str, Packing]] = {"vec": _columns, "vec16": _columns, "amx": _tiles}
