"""What pdserve lets an operator say to vLLM. Needs vLLM's parser, not its engine."""

import os

import pytest

from pdserve.engine.vllm import settings
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"model": "x"}, "--model"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"async_scheduling": True}, "--async-scheduling"),
    ],
)
def test_a_conflict_is_refused_by_name(chosen: dict[str, object], named: str) -> None:
    """What pdserve must own, and what it cannot hand over, is said at start."""
    with pytest.raises(ConfigError, match=named):
        settings.refuse(chosen)


def test_switching_async_scheduling_off_is_no_conflict() -> None:
    """It is what pdserve does anyway."""
    settings.refuse({"async_scheduling": False})


def test_the_operator_wins_over_the_defaults_for_cpu() -> None:
    """Defaults fill gaps only; a memory share given is not overridden by bytes."""
    assert settings.cpu_defaults({}) == {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": settings.CPU_KV_BYTES,
        "attention_backend": "CPU_MLA",
    }
    assert settings.cpu_defaults({"dtype": "bfloat16", "gpu_memory_utilization": 0.3}) == {"enforce_eager": True}


def test_ranks_share_the_cores_evenly() -> None:
    """Automatic binding fails on two cores, so the ranks' cores are named."""
    assert settings.cpu_environment(2, (4, 5, 6, 7))["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert settings.cpu_environment(1, (4,))["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    with pytest.raises(ConfigError, match="3 cores"):
        settings.cpu_environment(2, (1, 2, 3))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_that_no_other_process_can_open_is_refused_by_name(name: str) -> None:
    """Expandable segments have no IPC handle: said before a model is loaded, on devices only."""
    asked = {name: "max_split_size_mb:64, expandable_segments: True"}
    with pytest.raises(ConfigError, match=name):
        settings.check_allocator(MemoryKind.CUDA, asked)
    settings.check_allocator(MemoryKind.HOST, asked)
    settings.check_allocator(MemoryKind.ROCM, {name: "expandable_segments:False"})


def test_settings_are_checked_once() -> None:
    """A core that this process may not use, or nothing to serve, is refused before anything starts."""
    absent = max(os.sched_getaffinity(0)) + 1000
    with pytest.raises(ConfigError, match=str(absent)):
        VllmSettings(model="m", kvd_socket="/s", cpus=(absent,))
    with pytest.raises(ConfigError, match="model"):
        VllmSettings(model="", kvd_socket="/s")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_vllms_own_parser_reads_the_arguments() -> None:
    """Arguments pass through as vLLM reads them; what it refuses is a ConfigError, not an exit."""
    assert settings.parse(["--max-model-len", "512", "--no-enable-prefix-caching"]) == {
        "max_model_len": 512,
        "enable_prefix_caching": False,
    }
    with pytest.raises(ConfigError, match="--nope"):
        settings.parse(["--nope"])
    with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
        settings.parse(["--pipeline-parallel-size", "2"])
