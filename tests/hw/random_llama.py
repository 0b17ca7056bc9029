"""A random Llama of a real model's shape, for engines on a device: `python -m tests.hw.random_llama FOLDER`.

The KV of a token has the bytes of Qwen3-8B's (36 layers, 8 KV heads of 128); the rest is narrower, so that three
engines start in the time of one. The weights keep a signal's size from layer to layer and the queries are sharp, as
those of `engine.vllm.tiny`: the answer hangs on the KV of all positions. Made on the device: a host would need minutes.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pdserve.engine.vllm.tiny import VOCAB_SIZE, tiny_llama

LAYERS: Final = 36
KV_HEADS: Final = 8
HEAD: Final = 128
HEADS: Final = 32
HIDDEN: Final = 2048
WIDE: Final = 6144
KV_BYTES: Final = LAYERS * 2 * KV_HEADS * HEAD * 2
"""Of one token: keys and values in bfloat16."""
POSITIONS: Final = 20_480
SHARPNESS: Final = 4.0


def write(folder: Path) -> Path:
    """Writes the model into `folder` and returns it."""
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as small:  # for its tokenizer, and for what its configuration says
        tiny_llama(Path(small))
        folder.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / name).write_bytes((Path(small) / name).read_bytes())
        config: dict[str, Any] = json.loads((Path(small) / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    for part, weights in _parts():
        made = {}
        for name, size in weights.items():
            gain = SHARPNESS if name.endswith("q_proj.weight") else 1.0
            values = torch.randn(size, device="cuda") * (gain / size[-1] ** 0.5) if len(size) == 2 else torch.ones(size)
            made[name] = values.to(torch.bfloat16).cpu()
        save_file(made, str(folder / f"{part}.safetensors"), metadata={"format": "pt"})
    return folder


def _parts() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    yield (
        "ends",
        {
            "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB_SIZE, HIDDEN),
        },
    )
    for layer in range(LAYERS):
        sizes = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (WIDE, HIDDEN),
            "mlp.up_proj": (WIDE, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDE),
        }
        yield f"layer-{layer:02}", {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
