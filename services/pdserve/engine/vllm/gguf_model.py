"""Turns a GGUF file of the llama family into a Hugging Face model folder, float32.

GGUF                                     folder
  header  llama.*                        config.json, generation_config.json
  header  tokenizer.*                    tokenizer.json, tokenizer_config.json (chat template)
  tensors blk.N.attn_q ... (quantised)   model.safetensors (dequantised)

Only what SmolLM2 needs is read; another architecture or tokenizer is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import tokenizers

from pdserve.rpc.errors import ConfigError

Array = npt.NDArray[np.float32]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF's token type of special tokens."""


def convert(source: Path, target: Path) -> None:
    """Writes the folder `target`, which must exist, from the GGUF file `source`.

    Raises:
        ConfigError: an architecture, tokenizer or tensor that this converter does not know.
    """
    reader = gguf.GGUFReader(source)
    header = {name: field.contents() for name, field in reader.fields.items()}
    if header.get("general.architecture") != "llama":
        raise ConfigError(f"{source.name}: architecture {header.get('general.architecture')!r} is not llama")
    config = model_config(header)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            values = undo_rope_order(values, heads[part])
        tensors[tensor_name(tensor.name)] = np.ascontiguousarray(values)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors

    safetensors.numpy.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    _write_json(
        target / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config},
    )
    build_tokenizer(header).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", tokenizer_config(header))


def tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        ConfigError: an unknown tensor.
    """
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _BLOCK:
            return f"model.layers.{layer}.{_BLOCK[part]}.weight"
    raise ConfigError(f"unknown tensor {name!r}: this is not a plain llama model")


def undo_rope_order(values: Array, heads: int) -> Array:
    """Rows of a q or k projection, `(heads * head_size, hidden)`, back in Hugging Face's order.

    GGUF interleaves the two halves that rotary embedding pairs; per head:

        GGUF          a0 b0 a1 b1 ...
        Hugging Face  a0 a1 ... b0 b1 ...
    """
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def model_config(header: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model that a GGUF header describes."""
    heads = int(header["llama.attention.head_count"])
    hidden = int(header["llama.embedding_length"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(header["llama.feed_forward_length"]),
        "num_hidden_layers": int(header["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(header.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(header.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(header["llama.context_length"]),
        # GGUF holds float32; its shortest form is the number the authors wrote.
        "rms_norm_eps": float(str(np.float32(header["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(str(np.float32(header.get("llama.rope.freq_base", 10_000.0)))),
        "vocab_size": len(header["tokenizer.ggml.tokens"]),
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in header:
            config[f"{name}_token_id"] = int(header[f"tokenizer.ggml.{name}_token_id"])
    return config


def build_tokenizer(header: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE of a GGUF header.

    Raises:
        ConfigError: another kind of tokenizer, or another rule of splitting text before BPE.
    """
    kind, pre = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ConfigError(f"tokenizer {kind!r} with pre-tokenizer {pre!r} is not SmolLM's byte-level BPE")
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    # What `pre = smollm` means: every digit stands alone, then GPT-2's split.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [
        tokenizers.AddedToken(token, normalized=False, special=True)
        for token, kind_of in zip(tokens, header["tokenizer.ggml.token_type"], strict=True)
        if kind_of == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def tokenizer_config(header: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by name, and the chat template."""
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(header["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = header.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[int(index)]
    if "tokenizer.chat_template" in header:
        config["chat_template"] = header["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
