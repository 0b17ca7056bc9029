"""What two vLLM engines must share to exchange KV: names and values for kvd's pairing.

The model's part is known before the engine starts; each rank adds what only its tensors say.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pdserve.kvd.reshard import content
from pdserve.kvd.types import PROTOCOL, Layout
from pdserve.rpc.errors import ConfigError

_VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype"})
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 4096


def model_identity(vllm_config: Any) -> dict[str, str]:
    """The part that follows from vLLM's configuration."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "adapters": "none",
        "connector_protocol": str(PROTOCOL),
        "dtype": _name(model.dtype),
        "head_size": str(model.get_head_size()),
        "kv_dtype": _name(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        "kv_heads": str(model.get_total_num_kv_heads()),
        "layers": str(model.get_total_num_hidden_layers()),
        "mla": str(bool(model.use_mla)).lower(),
        "model": config_digest(model.hf_config.to_dict()),
        "quantization": str(model.quantization or "none"),
        "weights": weights_digest(model, vllm_config.load_config),
    }


def config_digest(config: Mapping[str, Any]) -> str:
    """Of a model's configuration, less what says where it was found."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    return _digest(json.dumps(kept, sort_keys=True, default=str).encode())


def weights_digest(model: Any, load: Any) -> str:
    """Names the weights without reading them all: random ones by their seed, those of a folder by
    `folder_digest`, those of a hub by repository and commit."""
    if str(load.load_format) == "dummy":
        return f"dummy:{model.seed}"
    folder = Path(model.model)
    if not folder.is_dir():
        commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or "main"
        return f"hub:{model.model}@{commit}"
    return folder_digest(folder)


def folder_digest(folder: Path) -> str:
    """Of the sizes, headers and evenly spread samples of the weight files: equal for copies of one
    model, unequal for two sets of weights of one shape.

    Raises:
        ConfigError: no weight files.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")) or sorted(folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"{folder} has no weights (*.safetensors, *.bin, *.gguf)")
    return _digest(*(part for file in files for part in _sampled(file)))


def rank_identity(backend: str, block_order: str, layout: Layout, ranks: int) -> dict[str, str]:
    """The part that a rank reads off its KV tensors; the same for all ranks. Where kvd can take blocks apart, their
    size and the number of ranks are the engine's own business."""
    if layout.division is not None:
        return {"attention_layout": f"{backend} {content(layout.division)}"}
    return {
        "attention_layout": f"{backend} {block_order}",
        "block_size": str(layout.block_size),
        "tensor_parallel": str(ranks),
    }


def _sampled(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    yield f"{file.name}:{size}".encode()
    with file.open("rb") as stream:
        start = 0
        if file.suffix == ".safetensors" and size > 8:
            (length,) = struct.unpack("<Q", stream.read(8))
            start = 8 + min(length, size)
            yield stream.read(min(length, size))
        span = max(size - start, 1)
        for sample in range(_SAMPLES):
            stream.seek(start + span * sample // _SAMPLES)
            yield stream.read(_SAMPLE_BYTES)


def _digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.hexdigest()[:32]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
