"""A gRPC server with what every service of ours has: typed errors, health, reflection.

Health is per service and NOT_SERVING until `serving(True)`; readiness is what proxies, load
balancers and the CLI wait for.
"""

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.rpc.errors import ConfigError
from pdserve.rpc.status import ErrorInterceptor
from pdserve.runtime.config import check_socket_path, join_address

log = structlog.get_logger(__name__)


class Server:
    """One grpc.aio server. Add servicers to `grpc`, then bind, start, and close with `stop`."""

    def __init__(
        self, services: Sequence[str], *, max_message: int | None = None, max_calls: int | None = None
    ) -> None:
        """`services`: full names of what will be added, as `pdserve.api.kvd.v1.Kvd`.

        A request of more than `max_message` bytes, and one beside `max_calls` others, gets RESOURCE_EXHAUSTED from
        gRPC itself, before it is here.
        """
        self._services = tuple(services)
        options = dict(SERVER_OPTIONS)
        if max_message is not None:
            options["grpc.max_receive_message_length"] = max_message
        self.grpc = grpc.aio.server(
            options=list(options.items()),
            interceptors=[ErrorInterceptor(_unexpected)],
            maximum_concurrent_rpcs=max_calls,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    def bind(self, host: str, port: int) -> int:
        """Binds `host:port` and returns the port; 0 takes a free one. Before `start`.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        return self._bind(join_address(host, port))

    def bind_unix(self, path: Path) -> None:
        """Binds a Unix socket that only this user may open. Before `start`.

        Raises:
            ConfigError: the path is too long, or a living process listens on it.
        """
        check_socket_path(path)
        # gRPC removes whatever socket lies at the path: one that a living process serves would be stolen.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise ConfigError(f"another process listens on {path}")
        self._bind(f"unix:{path}")
        path.chmod(0o600)

    async def start(self) -> None:
        """Answers calls; health says NOT_SERVING until `serving(True)`."""
        await self.serving(False)
        await self.grpc.start()

    async def serving(self, ready: bool) -> None:
        """Sets the health of every service, and of the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace: float = 0.0) -> None:
        """Takes no new call, gives open ones `grace` seconds, then cancels them; safe twice."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace or None)

    def _bind(self, address: str) -> int:
        try:
            return self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind {address}: {error}") from error


def _unexpected(method: str, error: BaseException) -> None:
    log.error("unexpected_error", method=method, exc_info=error)
