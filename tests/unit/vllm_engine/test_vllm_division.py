"""How a block of vLLM's KV divides: from the shapes of its tensors, and as its CPU kernels pack it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdserve.engine.vllm.division import PACKINGS, PLAIN, HeadFacts, divided
from pdserve.engine.vllm.identity import rank_identity
from pdserve.engine.vllm.layout import TensorShape, layout_of
from pdserve.kvd.reshard import content, match
from pdserve.kvd.types import Layout, Part

HEADS, SIZE, BLOCKS = 3, 32, 5
CPU_ATTN = TensorShape((85, 2, 32, 64), (4096, 2048, 64, 1), 4, 0)
FLASH_ATTN = TensorShape((85, 8, 16, 256), (32768, 256, 2048, 1), 2, 0)
K_AND_V_APART = TensorShape((2, 85, 16, 8, 128), (85 * 16384, 16384, 1024, 128, 1), 2, 0)
K_AND_V_IN_TURN = TensorShape((2, 85, 16, 8, 128), (16384, 32768, 1024, 128, 1), 2, 0)
MLA = TensorShape((85, 1, 16, 576), (9216, 9216, 576, 1), 4, 0)
MLA_3 = TensorShape((85, 16, 576), (9216, 576, 1), 4, 0)

CPU = HeadFacts(0, 1, 2, 2, 32, False, "vec")
CUDA = HeadFacts(0, 1, 8, 8, 128, False, PLAIN)
LATENT = HeadFacts(0, 1, 1, 1, 576, True, PLAIN)


def laid(tensor: TensorShape, facts: HeadFacts, block_size: int = 16, blocks: int = 85) -> Layout:
    """The layout of a rank with one layer."""
    layout, _ = layout_of({"model.layers.0": tensor}, blocks, block_size)
    found = divided(layout, [tensor], facts)
    found.check(1 << 40)
    return found


@pytest.mark.parametrize(
    ("tensor", "facts", "block_size", "what"),
    [
        (CPU_ATTN, CPU, 32, "k 128 B, v 128 B"),
        (CPU_ATTN, replace(CPU, packing="amx"), 32, "k 1 x 4096 B, v 2 x 2048 B per 32 tokens"),
        (FLASH_ATTN, CUDA, 16, "k 256 B, v 256 B"),
        (K_AND_V_APART, CUDA, 16, "k 256 B, v 256 B"),
        (K_AND_V_IN_TURN, CUDA, 16, "k 256 B, v 256 B"),
        (MLA, LATENT, 16, "kv 2304 B"),
        (MLA_3, LATENT, 16, "kv 2304 B"),
    ],
)
def test_what_a_token_and_head_have(tensor: TensorShape, facts: HeadFacts, block_size: int, what: str) -> None:
    """Each known shape has a division that fills its blocks, and says what is in them."""
    if facts.packing == "amx":
        tensor = replace(tensor, itemsize=2)
        what = what.replace("4096", "2048").replace("2048 B per", "1024 B per")
    found = laid(tensor, facts, block_size).division
    assert found is not None
    assert content(found) == what


@pytest.mark.parametrize(
    ("tensor", "facts", "block_size"),
    [
        (CPU_ATTN, replace(CPU, packing="neon"), 32),
        (CPU_ATTN, replace(CPU, heads=1), 32),
        (FLASH_ATTN, replace(CUDA, head_size=64), 16),
        (replace(CPU_ATTN, itemsize=1), CPU, 32),
    ],
)
def test_what_is_not_known_is_left_undivided(tensor: TensorShape, facts: HeadFacts, block_size: int) -> None:
    """Another kernel, or sizes that do not fit: such blocks are only copied as they are, and the identity holds both
    engines to one block size and one number of ranks."""
    found = laid(tensor, facts, block_size)
    assert found.division is None
    said = rank_identity("CPU_ATTN", "order", found, 2)
    assert (said["block_size"], said["tensor_parallel"]) == (str(block_size), "2")


def test_layers_that_differ_are_left_undivided() -> None:
    """One division stands for all layers."""
    other = replace(CPU_ATTN, stride=(4096, 2048, 64, 1), offset=1 << 21)
    layout, _ = layout_of({"model.layers.0": CPU_ATTN, "model.layers.1": other}, 85, 32)
    assert divided(layout, [CPU_ATTN, other], CPU).division is not None
    assert divided(layout, [CPU_ATTN, replace(other, itemsize=2)], CPU).division is None


def test_sizes_that_leave_two_readings_are_not_read() -> None:
    """As many heads as tokens: which dimension is which cannot be seen."""
    square = TensorShape((85, 16, 16, 256), (65536, 4096, 256, 1), 2, 0)
    assert laid(square, replace(CUDA, heads=16, total_heads=16)).division is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", ["ROCM_ATTN", "ROCM_AITER_FA", "FLASHINFER", "OF_TOMORROW"])
def test_a_kernel_that_is_not_known_is_not_guessed_at(backend: str) -> None:
    """Its tensor may have a known shape and be packed otherwise: then only equal layouts hand over."""
    from pdserve.engine.vllm.heads import head_facts  # imports vLLM

    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False,
            get_num_kv_heads=lambda parallel: 8,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 128,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={"model.layers.0": module}),
    )
    facts = head_facts(config, "model.layers.0", 0)
    assert all(laid(tensor, facts).division is None for tensor in (FLASH_ATTN, K_AND_V_APART, K_AND_V_IN_TURN))
    backend = "FLASH_ATTN"
    assert laid(FLASH_ATTN, head_facts(config, "model.layers.0", 0)).division is not None


def test_heads_that_lie_apart_are_not_divided() -> None:
    """A span each: which has which head is not told. The engine starts, and hands over between equal layouts."""
    apart = TensorShape((85, 2, 16, 256), (4096, 85 * 4096, 256, 1), 2, 0)
    assert laid(apart, replace(CUDA, heads=2, total_heads=2)).division is None


@pytest.mark.parametrize(
    ("ranks", "total", "firsts"), [(2, 4, [0, 2]), (4, 2, [0, 0, 1, 1]), (1, 2, [0]), (4, 1, [0, 0, 0, 0])]
)
def test_ranks_hold_the_heads_that_vllm_gives_them(ranks: int, total: int, firsts: list[int]) -> None:
    """In order; with more ranks than heads, neighbours hold the same."""
    held = max(1, total // ranks)
    assert [HeadFacts(r, ranks, held, total, 32, False, PLAIN).first_head for r in range(ranks)] == firsts


def test_orders_of_two_backends_fit() -> None:
    """Heads inside tokens, tokens inside heads, K and V apart: the same content, so one identity and a plan."""
    laid_out = [laid(tensor, CUDA) for tensor in (FLASH_ATTN, K_AND_V_APART, K_AND_V_IN_TURN)]
    for src in laid_out:
        for dst in laid_out:
            assert match([src], [dst]).layers == 1
    assert len({rank_identity("X", "order", layout, 1)["attention_layout"] for layout in laid_out}) == 1


# -- what the CPU kernels do ----------------------------------------------------------------

AMX = "amx"


def kernel(isa: str, dtype: Any, size: int, block_size: int, tokens: int) -> tuple[Any, Any, Any, list[int]]:
    """(cache, keys, values, blocks) after vLLM's kernel has put `tokens` tokens into blocks of a random order."""
    import torch
    from vllm import _custom_ops as ops

    torch.manual_seed(1)
    needed = -(-tokens // block_size)
    blocks = np.random.default_rng(block_size).permutation(max(needed, BLOCKS))[:needed].tolist()
    keys, values = (torch.randn(tokens, HEADS, size).to(dtype) for _ in range(2))
    cache = torch.zeros(max(needed, BLOCKS), HEADS, block_size, 2 * size, dtype=dtype)
    halves = cache.view(cache.shape[0], HEADS, 2 * block_size, size).chunk(2, dim=2)
    slots = torch.tensor([blocks[t // block_size] * block_size + t % block_size for t in range(tokens)])
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)
    return cache, keys, values, blocks


def pieces(cache: Any, blocks: list[int], parts: tuple[Part, ...], step: int, tokens: int) -> dict[Any, bytes]:
    """The bytes of each part of each step and head, as the parts say where they lie."""
    import torch

    flat = cache.view(torch.uint8).numpy().reshape(cache.shape[0], -1)
    per_block = cache.shape[2] // step
    slab = flat.shape[1] // HEADS
    found = {}
    for part in parts:
        for number in range(tokens // step):
            for head in range(HEADS):
                start = part.offset + number % per_block * part.step_stride + head * slab
                where = [start + unit * part.unit_stride for unit in range(part.units)]
                row = flat[blocks[number // per_block]]
                found[part.name, number, head] = b"".join(row[at : at + part.unit_bytes].tobytes() for at in where)
    return found


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("isa", "dtype", "size", "sizes"),
    [
        ("vec", "float32", 32, (32, 64, 96)),
        ("vec", "float16", 64, (32, 64, 96)),
        ("vec", "bfloat16", 128, (32, 64, 96)),
        ("vec16", "float32", 48, (16, 32, 48)),
        ("vec16", "bfloat16", 80, (32, 48, 96)),
        (AMX, "bfloat16", 32, (32, 64, 96)),
        (AMX, "bfloat16", 128, (32, 64, 96)),
    ],
)
def test_the_kernels_pack_as_we_say(isa: str, dtype: str, size: int, sizes: tuple[int, ...]) -> None:
    """Whatever the block size, each part of each step and head has the same bytes at the places that PACKINGS names;
    where a step is one token, they are that token's key and value."""
    import torch

    if isa == AMX and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    kind, tokens = getattr(torch, dtype), 96
    seen = []
    for block_size in sizes:
        cache, keys, values, blocks = kernel(isa, kind, size, block_size, tokens)
        step, parts = PACKINGS[isa](block_size, size, kind.itemsize)
        seen.append(pieces(cache, blocks, parts, step, tokens))
        assert sum(part.units * part.unit_bytes for part in parts) == step * 2 * size * kind.itemsize
        if step == 1:
            for name, given in (("k", keys), ("v", values)):
                for token in range(tokens):
                    for head in range(HEADS):
                        assert seen[-1][name, token, head] == given[token, head].view(torch.uint8).numpy().tobytes()
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0].values())) == len(seen[0])
