"""Builds a running daemon out of its parts, and closes it in reverse."""

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator

import structlog

from pdserve.api.kvd.v1 import kvd_pb2_grpc
from pdserve.kvd.config import KvdConfig
from pdserve.kvd.node import Node
from pdserve.kvd.operator import OperatorService
from pdserve.kvd.service import KvdService
from pdserve.kvd.transport.make import MakeTransports, make_transports
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.server import Server

log = structlog.get_logger(__name__)

_SERVICES = ("pdserve.api.kvd.v1.Kvd", "pdserve.api.kvd.v1.Operator")
_STOP_GRACE_S = 0.5


@contextlib.asynccontextmanager
async def serving(config: KvdConfig, *, transports: MakeTransports = make_transports) -> AsyncIterator[Node]:
    """A daemon that serves while the block runs.

    Raises:
        ConfigError: the folder or a socket cannot be used, or another daemon has them.
    """
    async with contextlib.AsyncExitStack() as stack:
        _own(config, stack)
        node = Node(config, transports=transports)
        stack.push_async_callback(node.aclose)
        await node.start()
        server = Server(_SERVICES)
        service = KvdService(node)
        kvd_pb2_grpc.add_KvdServicer_to_server(service, server.grpc)
        kvd_pb2_grpc.add_OperatorServicer_to_server(OperatorService(node), server.grpc)
        server.bind_unix(config.grpc_socket)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        stack.callback(service.close)
        shown = await _show_metrics(node, stack) if config.metrics.port is not None else ""
        if node.mover.slow_because:
            log.warning("kvd_copies_slowly", copier=node.mover.name, because=node.mover.slow_because)
        await server.serving(True)
        log.info(
            "kvd_ready",
            socket=str(config.grpc_socket),
            state_dir=str(config.state_dir),
            kvd_epoch=node.epoch,
            transports=[t.capabilities.name for t in node.transports],
            copier=node.mover.name,
            cluster_key=config.cluster_key.given,
            metrics=shown,
        )
        yield node


async def _show_metrics(node: Node, stack: contextlib.AsyncExitStack) -> str:
    """Serves them; returns the `host:port`."""
    from pdserve.kvd.metrics import metrics_of  # a tenth of a second of imports that only this needs
    from pdserve.runtime.telemetry.serve import MetricsServer

    metrics = metrics_of(node)
    metrics.with_process()
    server = MetricsServer(metrics)
    stack.push_async_callback(server.aclose)
    return await server.start(node.config.metrics)


def _own(config: KvdConfig, stack: contextlib.AsyncExitStack) -> None:
    """Makes the state folder and locks it for this daemon."""
    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(config.state_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the state folder {config.state_dir} cannot be used: {error}") from error
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"another kvd runs in {config.state_dir}") from error
