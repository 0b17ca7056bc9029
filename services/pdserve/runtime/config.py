"""The rules that every server process keeps: its cluster key, and what it may bind.

A cluster key signs tickets, locators and registrations. Without one a process serves this host only,
under a key that everybody knows; `--insecure` lifts that, and is logged at every start.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from pdserve.rpc.errors import ConfigError
from pdserve.rpc.key_file import exposed, read_key_file

log = structlog.get_logger(__name__)

KEY_FILE_VARIABLE = "PDSERVE_CLUSTER_KEY_FILE"
INSECURE_KEY = b"pdserve-insecure-loopback"
"""What a process without a key signs with."""
MIN_KEY_BYTES = 16
MAX_SOCKET_PATH = 107
"""Bytes of the longest Unix socket path that Linux takes."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret of a cluster."""

    secret: bytes
    given: bool
    """False: it is INSECURE_KEY."""

    def __repr__(self) -> str:
        """Says only whether there is one: the secret stays out of logs and tracebacks."""
        return f"ClusterKey(given={self.given})"


def load_cluster_key(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> ClusterKey:
    """Reads the key of `path`, else of PDSERVE_CLUSTER_KEY_FILE, else takes INSECURE_KEY.

    Raises:
        ConfigError: the file cannot be read, may be opened by others (see `read_key_file`), or holds fewer than
            MIN_KEY_BYTES.
    """
    if path is None and environ.get(KEY_FILE_VARIABLE):
        path = Path(environ[KEY_FILE_VARIABLE])
    if path is None:
        return ClusterKey(INSECURE_KEY, given=False)
    secret = read_key_file(path).strip()
    if why := exposed(path):
        log.warning("cluster_key_exposed", why=why)
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(f"cluster key file {path} holds {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed")
    return ClusterKey(secret, given=True)


def is_local(host: str) -> bool:
    """Whether only this host can reach an address: loopback, "localhost" or a `unix:` path."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def check_bind(host: str, key: ClusterKey, *, insecure: bool) -> None:
    """Refuses to open an unprotected service to the network. Logs `--insecure` at every start.

    Raises:
        ConfigError: `host` is more than local, there is no key, and `--insecure` was not given.
    """
    if insecure:
        log.warning("insecure", host=host, cluster_key=key.given, means="other hosts may reach this without proof")
        return
    if not is_local(host) and not key.given:
        raise ConfigError(
            f"binding {host} opens this service to the network: give --cluster-key-file, or --insecure to do it without"
        )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Where a service that has no other HTTP port serves GET /metrics."""

    port: int | None = None
    """TCP port of GET /metrics, for Prometheus; 0 takes a free one, which the log says; without it none is opened."""
    host: str = "127.0.0.1"
    """Address to bind for it."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a port that cannot be."""
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigError(f"metrics port {self.port} is not in 0..65535")

    def check(self, key: ClusterKey, *, insecure: bool = False) -> None:
        """Raises ConfigError where it would open an unprotected port to the network; see check_bind."""
        if self.port is not None:
            check_bind(self.host, key, insecure=insecure)


NO_METRICS: Final = MetricsConfig()
"""No port is opened for metrics."""


def check_socket_path(path: Path | str) -> None:
    """Refuses a Unix socket path that the kernel would.

    Raises:
        ConfigError: longer than MAX_SOCKET_PATH bytes.
    """
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise ConfigError(f"Unix socket path of {size} bytes, at most {MAX_SOCKET_PATH} fit: {path}")


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets round IPv6."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as its two parts.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    bare = host.strip("[]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in bare and host == bare):
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return bare, int(port)


def advertised_host(bound: str, towards: str) -> str:
    """The host under which `towards` reaches what is bound to `bound`.

    A wildcard is no address to dial: the one from which this host would reach `towards` is taken.

    Raises:
        ConfigError: there is no way to `towards`.
    """
    try:
        if not ipaddress.ip_address(bound.strip("[]")).is_unspecified:
            return bound
    except ValueError:
        return bound
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no address to advertise towards {towards}: {error}; give --advertise-host") from error
