"""The engines of this folder's tests: few kinds, so that many tests share each. See EnginePool."""

from pathlib import Path
from typing import Final

from pdserve.engine.vllm.testing_pool import EngineKind

NO_CACHE: Final = "--no-enable-prefix-caching"
CONTEXT: Final = ("--max-model-len", "512", "--block-size", "32", "--kv-cache-memory-bytes", str(4 << 20))


def alone(llama: Path) -> EngineKind:
    """Does everything itself, in one chunk and from nothing: the reference."""
    return EngineKind(llama, (*CONTEXT, "--max-num-batched-tokens", "512", NO_CACHE))


def usual(llama: Path, core: int) -> EngineKind:
    """Chunks of 64 tokens, and a prefix cache; prefill on core 0, decode on core 1."""
    return EngineKind(llama, (*CONTEXT, "--max-num-batched-tokens", "64", "--max-num-seqs", "16"), core)


def small(llama: Path, block_size: int, *more: str, core: int = 0, ranks: int = 1, megabytes: int = 2) -> EngineKind:
    """Chunks of 64 tokens, and blocks and a pool of some other size."""
    sizes = ("--block-size", str(block_size), "--kv-cache-memory-bytes", str(megabytes << 20))
    chunks = ("--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    return EngineKind(llama, (*chunks, *sizes, *more), core, ranks)


def latent(mla: Path, core: int = 0, ranks: int = 1, megabytes: int = 4) -> EngineKind:
    """Of a DeepSeek-V2 shape; vLLM has neither chunks nor a prefix cache for it on CPU."""
    return EngineKind(mla, ("--max-model-len", "256", "--kv-cache-memory-bytes", str(megabytes << 20)), core, ranks)
