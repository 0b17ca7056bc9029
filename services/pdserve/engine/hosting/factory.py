"""Builds the engine that a service hosts. The one place that knows both adapters; imports each only
when it is asked for."""

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path

from pdserve.engine.port import Engine
from pdserve.engine.sim.config import SimConfig
from pdserve.rpc.errors import ConfigError
from pdserve.runtime import flags


class EngineKind(enum.Enum):
    """Which adapter."""

    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which engine, and what of it."""

    engine: EngineKind = EngineKind.VLLM
    """Adapter: vllm, or sim, which has real KV and no model."""
    model: str = ""
    """Model folder, or a name that vLLM resolves; of sim: the name that clients ask for."""
    served_model_name: str = ""
    """Name that clients ask for, where it is not the model's own."""
    kvd_socket: Path | None = None
    """gRPC socket of this node's kvd; without it nothing is handed over (role both)."""
    kvd_seconds: float = 10.0
    """Longest wait for kvd at the start, seconds."""
    cpus: str = ""
    """vLLM on CPU: cores, as "0,1"; empty: wherever this process may run."""


_SIM_PREFIX = "sim-"
_SIM_SKIPPED = ("model",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every engine."""
    flags.add_flags(parser, EngineConfig)
    flags.add_flags(parser, SimConfig, _SIM_PREFIX, _SIM_SKIPPED)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What the command line says about the engine."""

    config: EngineConfig
    sim: SimConfig
    passthrough: tuple[str, ...] = ()
    """vLLM's own arguments: all after `--`."""


def choose(args: argparse.Namespace, passthrough: tuple[str, ...]) -> EngineChoice:
    """Reads the flags of `add_flags`.

    Raises:
        ConfigError: values that cannot work, or vLLM's arguments for another engine.
    """
    config = flags.from_args(EngineConfig, args)
    if config.engine is EngineKind.SIM and passthrough:
        raise ConfigError(f"arguments after -- are vLLM's, and the engine is sim: {' '.join(passthrough)}")
    if config.engine is EngineKind.SIM and config.cpus:
        raise ConfigError("--cpus is for vllm, and the engine is sim")
    if config.engine is EngineKind.VLLM and (odd := [name for name in vars(args) if name.startswith("sim_")]):
        raise ConfigError(f"--{odd[0].replace('_', '-')} is for sim, and the engine is vllm")
    sim = flags.from_args(SimConfig, args, _SIM_PREFIX, model=config.served_model_name or config.model or "sim")
    return EngineChoice(config, sim, passthrough)


async def build_engine(choice: EngineChoice) -> Engine:
    """A running engine, attached to kvd. Before this process uses gRPC: vLLM forks.

    Raises:
        ConfigError: settings that cannot work.
        KvdUnavailable: no kvd at the socket.
        PdserveError: kvd refused the engine, or it did not start.
    """
    config = choice.config
    if config.engine is EngineKind.SIM:
        from pdserve.engine.sim import SimEngine

        socket = None if config.kvd_socket is None else str(config.kvd_socket)
        return await SimEngine.start(choice.sim, socket, timeout=config.kvd_seconds)

    from pdserve.engine.vllm.engine import VllmEngine
    from pdserve.engine.vllm.settings import VllmSettings

    settings = VllmSettings(
        model=config.model,
        kvd_socket=str(config.kvd_socket or ""),
        kvd_seconds=config.kvd_seconds,
        served_model_name=config.served_model_name,
        args=choice.passthrough,
        cpus=_cpus(config.cpus),
    )
    return await VllmEngine.start(settings)


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError as error:
        raise ConfigError(f"--cpus {text!r} is not a list as 0,1") from error
