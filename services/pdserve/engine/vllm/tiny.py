"""Tiny random models on disk: real weights, configuration, tokenizer and chat template, no network.

They exist so that tests and the demo can run vLLM itself on two CPU cores. Their text is noise, but
it depends on every token of the prompt, so a wrong KV block shows in the answer.

The tokenizer is byte-level BPE: 256 bytes, then pairs of frequent letters, then the special tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
_SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID = VOCAB_SIZE - len(_SPECIAL)
EOS_ID = BOS_ID + 1
_LETTERS = "etaoinshrdlucmfw"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """The shape of a tiny model."""

    layers: int = 3
    """Decoder layers."""
    hidden: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """KV heads of the Llama shape; two, so that tensor parallel 2 splits them."""
    head_dim: int = 32
    """Size of one head of the Llama shape."""
    max_model_len: int = 1024
    """Positions that the model knows."""
    seed: int = 0
    """Seed of the weights."""


def tiny_llama(folder: Path, shape: TinyShape | None = None) -> Path:
    """Writes a Llama-shaped model of some 300 kB into `folder` and returns it."""
    shape = shape or TinyShape()
    config = {
        **_common(shape),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.q_proj.weight", (query, shape.hidden)
        yield f"{prefix}.k_proj.weight", (kv, shape.hidden)
        yield f"{prefix}.v_proj.weight", (kv, shape.hidden)
        yield f"{prefix}.o_proj.weight", (shape.hidden, query)

    return _write(folder, config, shape, attention)


def tiny_mla(folder: Path, shape: TinyShape | None = None) -> Path:
    """Writes a DeepSeek-V2-shaped model (MLA, dense layers) into `folder` and returns it.

    The latent is 512 + 64 wide as in the real model: vLLM's CPU kernel knows no other.
    """
    shape = shape or TinyShape(layers=2)
    rank, rope, nope, value = 512, 64, 32, 32
    config = {
        **_common(shape),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "first_k_dense_replace": shape.layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 2 * shape.hidden,
        "n_group": 1,
        "topk_group": 1,
    }

    def attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.q_proj.weight", (shape.heads * (nope + rope), shape.hidden)
        yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, shape.hidden)
        yield f"{prefix}.kv_a_layernorm.weight", (rank,)
        yield f"{prefix}.kv_b_proj.weight", (shape.heads * (nope + value), rank)
        yield f"{prefix}.o_proj.weight", (shape.hidden, shape.heads * value)

    return _write(folder, config, shape, attention)


def _common(shape: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }


def _write(folder: Path, config: dict[str, Any], shape: TinyShape, attention: Any) -> Path:
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(shape.seed)
    weights: dict[str, Any] = {}
    for name, size in _weights(shape, attention):
        if len(size) == 1:  # a norm
            weights[name] = numpy.ones(size, numpy.float32)
            continue
        # Variance-preserving, and sharper queries: attention then really chooses among positions,
        # so that the answer hangs on the KV of all of them.
        gain = 4.0 if name.endswith("q_proj.weight") else 1.0
        weights[name] = (random.standard_normal(size) * gain / size[1] ** 0.5).astype(numpy.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _tokenizer(folder, shape.max_model_len)
    return folder


def _weights(shape: TinyShape, attention: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = 2 * shape.hidden
    yield "model.embed_tokens.weight", (VOCAB_SIZE, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield from attention(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (wide, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (wide, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, wide)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, shape.hidden)


def _tokenizer(folder: Path, max_model_len: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS][: BOS_ID - len(vocab)]
    vocab |= {a + b: len(vocab) + index for index, (a, b) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[1],
            "chat_template": _TEMPLATE,
            "model_max_length": max_model_len,
            "clean_up_tokenization_spaces": False,
        },
    )


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
