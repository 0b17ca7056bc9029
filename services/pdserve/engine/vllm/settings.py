"""What an operator says about a vLLM engine, and what pdserve must own of vLLM's own arguments."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError

_OURS: Final[Mapping[str, str]] = {
    "model": "give it to pdserve as --model",
    "served_model_name": "give it to pdserve as --served-model-name",
    "kv_transfer_config": "pdserve's connector is the only one",
    "ec_transfer_config": "pdserve moves KV only",
    "kv_offloading_size": "it needs a connector of its own",
    "disable_log_stats": "pdserve reads load and times from vLLM's statistics",
    "worker_cls": "pdserve places the KV memory of vLLM's own workers",
    "scheduler_cls": "pdserve is driven by vLLM's own scheduler",
}
"""Arguments that pdserve sets or needs as they are, and why."""

_UNSUPPORTED: Final[Mapping[str, str]] = {
    "pipeline_parallel_size": "the layers of one prompt must lie on every rank",
    "data_parallel_size": "each data-parallel rank is an engine of its own: start one service each",
    "decode_context_parallel_size": "a block must lie whole on one rank",
    "prefill_context_parallel_size": "a block must lie whole on one rank",
    "speculative_config": "the draft model's KV is not handed over",
    "spec_method": "the draft model's KV is not handed over",
    "spec_model": "the draft model's KV is not handed over",
    "enable_lora": "a hand-over does not know of adapters",
    "enable_elastic_ep": "an engine's ranks are fixed for its life",
    "kv_sharing_fast_prefill": "layers that share KV are not handed over",
    "enable_sleep_mode": "it frees memory that kvd has mapped",
    "diffusion_config": "only models that decode token by token are handed over",
    "nnodes": "an engine's ranks must share one node's kvd",
    "async_scheduling": "a preemption must be fenced before the next step is made",
}
"""Arguments that may not differ from vLLM's default, and why; `async_scheduling` may be off."""

_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that configure torch's allocator on devices."""

CPU_KV_BYTES: Final = 1 << 30
"""KV memory of an engine on CPU where nothing is said: vLLM's own choice is nearly all memory."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine."""

    model: str
    """A model folder, or a name that vLLM resolves."""
    kvd_socket: str = ""
    """Path of the gRPC socket of this node's kvd; empty: plain vLLM, which hands nothing over."""
    kvd_seconds: float = 10.0
    """Longest wait for that socket to appear."""
    served_model_name: str = ""
    """The name that clients ask for; empty: `model`."""
    args: tuple[str, ...] = ()
    """vLLM's own arguments, as on its command line; passed through unchanged."""
    cpus: tuple[int, ...] = ()
    """On CPU: cores to run on, split evenly over the ranks; empty: wherever this process may."""

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work."""
        if not self.model:
            raise ConfigError("model must name a folder or a model")
        if missing := sorted(set(self.cpus) - os.sched_getaffinity(0)):
            raise ConfigError(f"cpus {missing} are not available to this process")


def parse(args: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine arguments by name, read by vLLM's own parser; only those that differ from its
    defaults. `--config FILE` takes them from a YAML file, over which the others go.

    Raises:
        ConfigError: what vLLM refuses, or what pdserve does, by name; or a file that cannot be read.
    """
    import yaml  # type: ignore[import-untyped]  # vLLM brings it, for such a file
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vllm is not typed here
        def error(self, message: str) -> None:
            raise ConfigError(f"vLLM's arguments: {message}")

    parser = Parser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    defaults = vars(parser.parse_args([]))
    try:
        given = vars(parser.parse_args(list(args)))
    except (ValueError, OSError, AttributeError, AssertionError, yaml.YAMLError) as error:  # of the file, by its reader
        raise ConfigError(f"vLLM's arguments: {error}") from error
    chosen = {name: value for name, value in given.items() if value != defaults[name]}
    refuse(chosen)
    return chosen


def refuse(chosen: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments that conflict with what pdserve does."""
    for names, verb in ((_OURS, "is pdserve's"), (_UNSUPPORTED, "is not supported")):
        for name, why in names.items():
            if name in chosen and not (name == "async_scheduling" and not chosen[name]):
                raise ConfigError(f"vLLM's --{name.replace('_', '-')} {verb}: {why}", argument=name)


def check_allocator(memory: MemoryKind, environ: Mapping[str, str]) -> None:
    """Raises ConfigError where torch would allocate device memory that kvd cannot open: virtual memory has no IPC
    handle."""
    if memory is MemoryKind.HOST:
        return
    for name in _ALLOCATOR:
        wanted = environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in wanted:
            raise ConfigError(f"{name} asks for expandable segments, which kvd cannot open: leave them off")


def cpu_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine on CPU needs where the operator says nothing."""
    defaults: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    if "gpu_memory_utilization" not in chosen:
        defaults["kv_cache_memory_bytes"] = CPU_KV_BYTES
    if chosen.get("dtype", "float32") == "float32" and "attention_config" not in chosen:
        # For models with latent attention (others pass over it): on a processor with AMX vLLM would take a
        # backend that packs its weights, and cannot pack float32.
        defaults["attention_backend"] = "CPU_MLA"
    return {name: value for name, value in defaults.items() if name not in chosen}


def cpu_environment(ranks: int, cpus: Sequence[int]) -> dict[str, str]:
    """Environment of an engine on CPU; what the operator has set already stays.

    One rank computes inside EngineCore; more have a process each, bound to their share of `cpus`.

    Raises:
        ConfigError: cores that do not split evenly over the ranks.
    """
    cores = list(cpus) or sorted(os.sched_getaffinity(0))
    if len(cores) % ranks:
        raise ConfigError(f"{len(cores)} cores do not split evenly over {ranks} ranks; name others in cpus")
    each = len(cores) // ranks
    if ranks == 1:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    groups = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    bind = "|".join(",".join(map(str, group)) for group in groups)
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}
