"""What a command that hosts an engine is made of, and how its command line is understood."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pdserve.engine.hosting import factory
from pdserve.engine.hosting.factory import EngineChoice
from pdserve.engine.hosting.handoffs import Handoffs
from pdserve.engine.hosting.peers import Peers
from pdserve.engine.port import Engine
from pdserve.rpc.errors import ConfigError
from pdserve.runtime import flags, log
from pdserve.runtime.beats import Role
from pdserve.runtime.calls import Calls
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import NO_METRICS, MetricsConfig, split_address
from pdserve.runtime.registration import RegistrationConfig
from pdserve.runtime.server import Server
from pdserve.runtime.telemetry.catalogue import Metric
from pdserve.runtime.telemetry.metrics import Metrics

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Where the service is, and whom it tells."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """TCP port; 0 takes a free one, which the log and the proxy are told."""
    advertise_host: str = ""
    """Host under which the proxy reaches this service; empty: the bound one, or what a route says."""
    proxy: str = ""
    """`host:port` of the proxy's registration socket (--ping-port); empty: none is told."""
    role: str = ""
    """What the engine is tuned for; empty: the command's own."""
    cluster_key_file: Path | None = None
    """File with the key that every member of the cluster has."""
    insecure: bool = False
    """Bind more than loopback without a cluster key."""
    metrics: MetricsConfig = NO_METRICS
    """Where Prometheus may ask."""
    drain_seconds: float = 30.0
    """Longest wait for open requests after the first signal, seconds."""
    locator_seconds: float = 600.0
    """Life of the locator in each beat, seconds; longer than a request may wait for its engine."""
    log_format: log.LogFormat = log.LogFormat.AUTO
    """How the log looks."""
    log_level: log.LogLevel = log.LogLevel.INFO
    """Least severe event in the log."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is not in 0..65535")
        if self.drain_seconds < 0 or self.locator_seconds <= 0:
            raise ValueError("drain_seconds must be at least 0, locator_seconds above 0")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a service is made of."""

    engine: Engine
    handoffs: Handoffs | None
    """None: no kvd."""
    peers: Peers
    calls: Calls
    clock: Clock
    server: Server
    metrics: Metrics
    role: Role
    """As it is advertised."""


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """One of the commands that host an engine."""

    name: str
    """Of the command."""
    service: str
    """Full name of its gRPC service."""
    roles: tuple[Role, ...]
    """It may advertise; the first where nothing is said."""
    settings: type[S]
    """Config of the service itself."""
    add: Callable[[Parts, S], None]
    """Adds the servicer to `parts.server`, and what it can tell to `parts.metrics`."""
    metrics: Sequence[Metric]
    """All that it may show."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[S]):
    """A command line that was understood."""

    host: HostConfig
    engine: EngineChoice
    beats: RegistrationConfig
    service: S
    role: Role


def read(program: Program[S], argv: Sequence[str]) -> Plan[S]:
    """Understands a command line.

    Raises:
        ConfigError: settings that cannot work.
        SystemExit: `--help`, or flags that argparse refuses.
    """
    own, passthrough = flags.split_passthrough(argv)
    parser = argparse.ArgumentParser(
        program.name, description=program.add.__doc__, epilog="What follows -- goes to vLLM.", allow_abbrev=False
    )
    factory.add_flags(parser)
    for config in (HostConfig, RegistrationConfig, program.settings):
        flags.add_flags(parser, config)
    args = parser.parse_args(own)
    host = flags.from_args(HostConfig, args)
    role = next((role for role in program.roles if role == (host.role or program.roles[0])), None)
    if role is None:
        raise ConfigError(f"{program.name} has no role {host.role}: it is {' or '.join(program.roles)}")
    engine = factory.choose(args, tuple(passthrough))
    if engine.config.kvd_socket is None and role != "both":
        raise ConfigError(f"a {role} service hands KV over: it needs --kvd-socket")
    if host.proxy:
        split_address(host.proxy)
    return Plan(host, engine, flags.from_args(RegistrationConfig, args), flags.from_args(program.settings, args), role)
