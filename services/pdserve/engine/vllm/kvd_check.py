"""Whether a kvd can take an engine's device memory, asked before the engine starts: loading a model takes minutes.

Asked from a process of its own (`python -m pdserve.engine.vllm.kvd_check SOCKET`): the service's may not use gRPC
before vLLM has forked.
"""

import json
import subprocess
import sys
from typing import Final

from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import ConfigError, KvdUnavailable

_TAKES_DEVICES: Final = frozenset({"gpu_ipc"})
"""Transports that map device memory."""
_ANSWER_S: Final = 10.0
"""Longest wait for kvd's answer."""
_PROCESS_S: Final = 30.0
"""Longest life of the process that asks: it imports gRPC first."""


def check(socket: str, kind: MemoryKind) -> None:
    """Whether kvd takes this kind of memory.

    Raises:
        ConfigError: it does not.
        KvdUnavailable: it does not say in time.
    """
    if kind is MemoryKind.HOST:
        return  # every kvd does
    refuse(socket, kind, _asked(socket))


def refuse(socket: str, kind: MemoryKind, transports: list[str]) -> None:
    """Raises ConfigError where none of kvd's transports takes device memory."""
    if not _TAKES_DEVICES & set(transports):
        raise ConfigError(
            f"the engine's KV lies in {kind.value} memory, and the kvd at {socket} runs {', '.join(transports)}: "
            "start it with --transport gpu_ipc"
        )


def _asked(socket: str) -> list[str]:
    command = [sys.executable, "-m", "pdserve.engine.vllm.kvd_check", socket]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PROCESS_S, check=True)
        transports: list[str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise KvdUnavailable(f"the kvd at {socket} does not say what it runs: {error}") from error
    return transports


def _main(socket: str) -> None:
    import grpc

    from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc

    with grpc.insecure_channel(f"unix:{socket}") as channel:
        operator = kvd_pb2_grpc.OperatorStub(channel)
        described = operator.Describe(kvd_pb2.DescribeRequest(), timeout=_ANSWER_S, wait_for_ready=True)
    sys.stdout.write(json.dumps(list(described.transports)))


if __name__ == "__main__":
    _main(sys.argv[1])
