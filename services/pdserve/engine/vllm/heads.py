"""What vLLM says about the KV heads of a rank, and how its kernel packs them."""

from typing import Any

from pdserve.engine.vllm import versions
from pdserve.engine.vllm.division import PLAIN, HeadFacts

_PLAIN = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Kernels that read each token's K and V of a head as one row. Others pack them (ROCM_ATTN in tiles of 16 bytes), in
tensors of the same shape too, so only those that are known to do so are taken for plain."""


def head_facts(vllm_config: Any, layer: str, rank: int) -> HeadFacts:
    """Of a layer, which stands for all: `divided` looks whether they are alike. After vLLM has chosen its kernels."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    packing = versions.backend_name(vllm_config, layer)
    if packing in _PLAIN or model.use_mla:  # a latent is one row, whoever reads it
        packing = PLAIN
    elif packing == "CPU_ATTN":
        module = vllm_config.compilation_config.static_forward_context[layer]
        packing = str(getattr(module, "isa", "not told"))
    return HeadFacts(
        rank=rank,
        ranks=parallel.tensor_parallel_size,
        heads=model.get_num_kv_heads(parallel),
        total_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        latent=bool(model.use_mla),
        packing=packing,
    )
