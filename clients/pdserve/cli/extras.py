"""Whether what a command starts is installed: asked before anything starts, without importing it."""

import importlib.util
from collections.abc import Sequence

from pdserve.rpc.errors import ConfigError

NODE = (
    "aiohttp", "grpc_health", "msgspec", "numpy", "opentelemetry.sdk", "prometheus_client", "structlog", "tokenizers",
    "zmq",
)  # fmt: skip
"""Modules of the extra `node`, which every service needs."""


def check(command: str, extra: str, modules: Sequence[str]) -> None:
    """Whether the modules of an extra are there.

    Raises:
        ConfigError: some are not; it says what `command` needs.
    """
    if lacking := [name for name in modules if not _there(name)]:
        raise ConfigError(f"`pdserve {command}` needs {', '.join(lacking)}: install pdserve with the extra `{extra}`")


def check_services(command: str, engine: str) -> None:
    """Whether the services are there, and the engine `vllm` where that is to be started.

    Raises:
        ConfigError: they are not.
    """
    check(command, "node", NODE)
    if engine == "vllm" and not _there("vllm"):
        raise ConfigError(
            f"`pdserve {command}` needs vllm: it comes with the vendor's image for GPUs, for CPU with the extra `cpu`; "
            "or simulate with --engine sim"
        )


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is not there; it is there as None
        return False
