"""Where the blocks of vLLM's KV tensors lie, as kvd's layout. Pure: numbers in, numbers out.

A layer's tensor has one dimension of blocks. What lies inside a block must be dense, in any order
of dimensions; a dimension outside it (K and V apart) gives one span each:

    one span    (blocks, kv_heads, tokens, 2 * head)      CPU_ATTN, and (blocks, 1, tokens, latent) MLA
    two spans   (2, blocks, tokens, kv_heads, head)       K and V apart
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.kvd.types import Layout, Span
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One layer's tensor, without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    itemsize: int
    """Bytes of an element."""
    offset: int
    """Bytes from the region's start to element 0."""


def spans_of(tensor: TensorShape, num_blocks: int) -> tuple[Span, ...]:
    """The spans of one layer, in order of their offsets.

    Raises:
        ConfigError: not exactly one dimension of `num_blocks`, or gaps inside a block.
    """
    block = _block_dimension(tensor, num_blocks)
    pitch = tensor.stride[block]
    others = [d for d, size in enumerate(tensor.shape) if d != block and size > 1]
    inner = sorted((d for d in others if tensor.stride[d] < pitch), key=lambda d: tensor.stride[d])
    outer = [range(0, tensor.shape[d] * tensor.stride[d], tensor.stride[d]) for d in others if d not in inner]
    dense = 1
    for d in inner:
        if tensor.stride[d] != dense:
            raise ConfigError(
                f"the blocks of a KV tensor are not dense: shape {tensor.shape}, strides {tensor.stride}; "
                "choose another attention backend or KV layout"
            )
        dense *= tensor.shape[d]
    starts = sorted(tensor.offset + sum(steps) * tensor.itemsize for steps in itertools.product(*outer))
    return tuple(Span(start, pitch * tensor.itemsize, dense * tensor.itemsize) for start in starts)


def layout_of(tensors: Mapping[str, TensorShape], num_blocks: int, block_size: int) -> tuple[Layout, tuple[str, ...]]:
    """The layout of a rank and its layers' names, in the order in which the model computes them.

    Raises:
        ConfigError: as `spans_of`, or no layer at all.
    """
    if not tensors:
        raise ConfigError("the model has no KV cache to hand over")
    names = tuple(sorted(tensors, key=_layer_order))
    layers = tuple(spans_of(tensors[name], num_blocks) for name in names)
    return Layout(block_size=block_size, num_blocks=num_blocks, layers=layers), names


def block_order(tensor: TensorShape, num_blocks: int) -> str:
    """The dimensions around and inside a block, outermost first; equal strings mean that equal
    bytes mean equal KV. `1:2 b 2:32 3:64 *4`: dimension 1, of size 2, lies outside the blocks.

    Raises:
        ConfigError: as `spans_of`.
    """
    block = _block_dimension(tensor, num_blocks)
    order = sorted(range(len(tensor.shape)), key=lambda d: (-tensor.stride[d], d))
    dims = ["b" if d == block else f"{d}:{tensor.shape[d]}" for d in order if d == block or tensor.shape[d] > 1]
    return " ".join([*dims, f"*{tensor.itemsize}"])


def _block_dimension(tensor: TensorShape, num_blocks: int) -> int:
    found = [d for d, size in enumerate(tensor.shape) if size == num_blocks]
    if len(found) != 1:
        # A wrong guess would copy other requests' KV, so two candidates are as bad as none.
        raise ConfigError(
            f"{len(found)} dimensions of {num_blocks} blocks in a KV tensor of shape {tensor.shape}; "
            "another kv_cache_memory_bytes changes the number of blocks"
            if found
            else f"no dimension of {num_blocks} blocks in a KV tensor of shape {tensor.shape}"
        )
    return found[0]


def _layer_order(name: str) -> tuple[tuple[int, ...], str]:
    """`model.layers.10.self_attn.attn` behind `model.layers.9.self_attn.attn`."""
    return tuple(int(number) for number in re.findall(r"\d+", name)), name
