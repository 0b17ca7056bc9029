"""Starts vLLM: from an operator's settings to a running AsyncLLM whose ranks kvd has mapped."""

import contextlib
import gc
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from pdserve.engine.port import EngineInfo
from pdserve.engine.vllm import kvd_check, refusals
from pdserve.engine.vllm import settings as rules
from pdserve.engine.vllm.options import ConnectorOptions
from pdserve.engine.vllm.settings import VllmSettings
from pdserve.engine.vllm.startup import RankFacts, StartReport
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError, EngineDied, KvdUnavailable

log = structlog.get_logger(__name__)

_CONNECTOR = ("KvdConnector", "pdserve.engine.vllm.connector")


@dataclass(frozen=True, slots=True)
class Launched:
    """A running vLLM."""

    llm: Any
    """vLLM's AsyncLLM; the owner shuts it down."""
    config: Any
    """vLLM's VllmConfig."""
    info: EngineInfo


def launch(settings: VllmSettings, stat_logger: Callable[[Any, int], Any]) -> Launched:
    """Builds and starts an engine; blocks for seconds. Call it on the running loop, before this
    process uses gRPC: EngineCore is forked.

    Raises:
        ConfigError: vLLM or settings that cannot work.
        KvdUnavailable: no kvd that answers at the socket.
        PdserveError: kvd refused the engine.
        EngineDied: vLLM did not start; its log says why.
    """
    _wait_for_kvd(settings)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from pdserve.engine.vllm import versions  # imports vLLM, which reads the environment

    version = versions.check()
    engine_id = str(uuid.uuid4())
    with tempfile.TemporaryDirectory(prefix="pdserve-start-") as folder:
        config = _configure(settings, engine_id, folder)
        report = StartReport(folder)
        llm = _start(config, stat_logger, settings.cpus, report)
        ranks = report.read()
    try:
        info = _info(settings, engine_id, config, ranks)
    except BaseException:
        llm.shutdown()
        raise
    log.info(
        "engine.started",
        engine_id=engine_id,
        vllm=version,
        model=info.model,
        ranks=info.ranks,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        attention=info.identity.get("attention_layout", ""),
    )
    return Launched(llm, config, info)


def _wait_for_kvd(settings: VllmSettings) -> None:
    """An engine takes long to start: a wrong path should not, and a kvd that starts beside us may."""
    if not settings.kvd_socket:
        return
    deadline = time.monotonic() + settings.kvd_seconds
    while not Path(settings.kvd_socket).is_socket():
        if time.monotonic() > deadline:
            raise KvdUnavailable(f"there is no kvd at {settings.kvd_socket}")
        time.sleep(0.05)


def _configure(settings: VllmSettings, engine_id: str, report: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    chosen = rules.parse(settings.args)
    ranks = int(chosen.get("tensor_parallel_size", 1))
    memory = MemoryKind.HOST
    if settings.kvd_socket:
        memory = _memory_kind(current_platform)
        rules.check_allocator(memory, os.environ)
        kvd_check.check(settings.kvd_socket, memory)
    if on_cpu := current_platform.is_cpu():
        chosen |= rules.cpu_defaults(chosen)
        for name, value in rules.cpu_environment(ranks, settings.cpus).items():
            os.environ.setdefault(name, value)
    elif settings.cpus:
        raise ConfigError("cpus is for engines on CPU")
    arguments = {
        **chosen,
        "model": settings.model,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
    }
    if settings.kvd_socket:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector=_CONNECTOR[0],
            kv_connector_module_path=_CONNECTOR[1],
            kv_role="kv_both",
            engine_id=engine_id,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={},
        )
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"vLLM refuses the configuration: {error}") from error
    if (
        on_cpu
        and config.model_config.use_mla
        and not any("rotary" in op for op in config.compilation_config.custom_ops)
    ):
        # vLLM's CPU rotary op is wrong for MLA from the second token on.
        config.compilation_config.custom_ops.append("-rotary_embedding")
    if on_cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM has just set spawn: 15 s more
    if not settings.kvd_socket:
        return config
    from pdserve.engine.vllm.identity import model_identity

    options = ConnectorOptions(
        engine_id=engine_id,
        kvd_socket=str(Path(settings.kvd_socket).absolute()),
        ranks=ranks,
        identity=model_identity(config),
        report=report,
        memory=memory.value,
    )
    config.kv_transfer_config.kv_connector_extra_config = options.encode()
    return config


def _memory_kind(platform: Any) -> MemoryKind:
    """Where vLLM's platform has its KV."""
    if platform.is_cpu():
        return MemoryKind.HOST
    if platform.is_cuda():
        return MemoryKind.CUDA
    if platform.is_rocm():
        return MemoryKind.ROCM
    raise ConfigError(f"vLLM runs on {type(platform).__name__}; pdserve hands over on CPU, CUDA and ROCm")


def _start(config: Any, stat_logger: Callable[[Any, int], Any], cpus: Sequence[int], report: StartReport) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        with _to_be_inherited(cpus, config), refusals.heard(report):
            return AsyncLLM.from_vllm_config(config, stat_loggers=[stat_logger], disable_log_stats=True)
    except Exception as error:
        said = report.error()
        if said is not None:
            raise said from error
        raise EngineDied(f"vLLM did not start: {error}") from error


@contextlib.contextmanager
def _to_be_inherited(cpus: Sequence[int], config: Any) -> Iterator[None]:
    """What the processes that vLLM forks inside take over from this one: cores, threads, no compiler."""
    if config.device_config.device_type != "cpu":
        yield
        return
    import torch
    import torch._dynamo

    from pdserve.engine.vllm import seeds

    seeds.install()
    cores, threads, compiler_off = os.sched_getaffinity(0), torch.get_num_threads(), torch._dynamo.config.disable
    if config.parallel_config.tensor_parallel_size == 1:  # ranks of their own are bound by vLLM
        torch.set_num_threads(len(cpus) or len(cores))
        if cpus:
            os.sched_setaffinity(0, cpus)
    if config.model_config.enforce_eager:
        # vLLM compiles a few small functions (log probabilities) even so: 10 to 20 s at the first request.
        torch._dynamo.config.disable = True
    # vLLM collects garbage some ten times while an engine starts and ends. Each time it would look at, and thereby
    # copy, all that is imported here: more than half of a start, and a third of an end. It stays
    # frozen: garbage of this moment is little.
    gc.freeze()
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        torch._dynamo.config.disable = compiler_off


def _info(settings: VllmSettings, engine_id: str, config: Any, ranks: Sequence[RankFacts]) -> EngineInfo:
    expected = config.parallel_config.tensor_parallel_size
    if not settings.kvd_socket:
        ranks = [_alone(config)] * expected
    if len(ranks) != expected:
        raise EngineDied(f"{len(ranks)} of {expected} ranks gave their memory to kvd")
    model, first = config.model_config, ranks[0]
    return EngineInfo(
        engine_id=engine_id,
        model=settings.served_model_name or settings.model,
        tokenizer=str(model.tokenizer),
        max_model_len=model.max_model_len,
        block_size=first.block_size,
        num_blocks=first.num_blocks - 1,  # vLLM keeps block 0 for itself
        ranks=expected,
        identity=first.identity,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos(model),
        layout=first.layout,
    )


def _alone(config: Any) -> RankFacts:
    """The facts of a rank that has no connector to tell them."""
    from pdserve.engine.vllm.identity import model_identity

    cache = config.cache_config
    return RankFacts(0, cache.num_gpu_blocks, cache.block_size, model_identity(config))


def _eos(model: Any) -> tuple[int, ...]:
    generation: Mapping[str, Any] = model.try_get_generation_config() or {}
    found = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
