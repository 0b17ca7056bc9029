"""Settings of the daemon: checked once, at its start."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdserve.kvd.limits import Limits
from pdserve.kvd.peers.config import NO_PEERS, PeerConfig
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.config import INSECURE_KEY, NO_METRICS, ClusterKey, MetricsConfig, check_socket_path

INSECURE_LOOPBACK_KEY: Final = INSECURE_KEY
"""What is signed with where no cluster key was given; fit for one host only."""


class TransportName(enum.Enum):
    """The transports that a daemon can be told to use."""

    SHM = "shm"
    SIM = "sim"
    NIXL = "nixl"
    GPU_IPC = "gpu_ipc"


class GpuCopy(enum.Enum):
    """Ways to copy within and between devices of a node."""

    KERNEL = "kernel"
    """One launch of a gather/scatter kernel for many runs: fast, on the multiprocessors."""
    ENGINES = "engines"
    """One batch for the copy engines (CUDA 13), which is to leave the multiprocessors free."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The simulated link."""

    bandwidth: float = 10e9
    """Bytes a second."""
    delay: float = 0.0
    """Seconds from the end of a copy's turn on the link until its bytes are in place."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        if not self.bandwidth > 0 or not self.delay >= 0:
            raise ConfigError(f"a link of {self.bandwidth} bytes/s and {self.delay} s cannot be simulated")


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """The reads from other nodes over nixl."""

    tls: str = ""
    """UCX_TLS of the nixl processes: the transports that UCX may use, as "tcp"; UCX's choice where empty."""
    net_devices: str = ""
    """UCX_NET_DEVICES of the nixl processes: the devices that UCX may use, as "eth0"; all where empty."""
    poll: float = 0.01
    """Seconds between the looks of the serving process's thread, which events wake as well; at least a thousandth."""
    stall: float = 5.0
    """Seconds without a byte from a peer until its copies fail and the process that reads from it is ended."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        if not self.poll >= 0.001:
            raise ConfigError(f"nixl poll must be at least 0.001 s, not {self.poll}: below, its thread never sleeps")
        if not self.stall > 0:
            raise ConfigError(f"nixl stall must be above 0, not {self.stall}")


@dataclass(frozen=True, slots=True)
class KvdConfig:
    """The daemon of a node."""

    state_dir: Path
    """Folder of its sockets and its lock; made if missing, only its owner may enter."""
    socket: Path | None = None
    """Unix socket of its gRPC services; kvd.sock in the state folder where not given."""
    transport: TransportName = TransportName.SHM
    """How bytes move: shm copies between mappings, sim adds the bandwidth and delay of --sim-*, nixl is shm with
    nixl to other nodes, gpu_ipc is shm with copies between memory of this node's devices."""
    sim: SimConfig = SimConfig()
    """The link of transport sim."""
    nixl: NixlConfig = NixlConfig()
    """The reads of transport nixl."""
    gpu_copy: GpuCopy = GpuCopy.KERNEL
    """How transport gpu_ipc copies: kernel, or engines."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines and bounds of transfers."""
    cluster_key: ClusterKey = field(default_factory=lambda: ClusterKey(INSECURE_KEY, given=False))
    """What tickets and locators are signed under."""
    grace: float = 2.0
    """Seconds within which a lost Attach stream may come back before its engine's transfers fail."""
    hello_timeout: float = 5.0
    """Seconds that a new connection has for its first message."""
    drain: float = 30.0
    """Seconds that the first SIGTERM waits for open transfers."""
    metrics: MetricsConfig = NO_METRICS
    """Where Prometheus may ask."""
    peer: PeerConfig = NO_PEERS
    """Other nodes' daemons."""
    insecure: bool = False
    """Talks to peers in clear, without TLS, beyond this host; said in the log at every start."""
    max_backlog: int = 65_536
    """Messages that wait for one participant; one that does not read them is disconnected."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for name in ("grace", "hello_timeout", "max_backlog"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.drain < 0:
            raise ConfigError(f"drain must not be below 0: {self.drain}")
        self.metrics.check(self.cluster_key)
        self.peer.check(self.cluster_key, insecure=self.insecure)
        for path in (self.grpc_socket, self.memory_socket, self.notice_socket):
            check_socket_path(path)

    @property
    def grpc_socket(self) -> Path:
        """Where gRPC listens."""
        return self.socket or self.state_dir / "kvd.sock"

    @property
    def memory_socket(self) -> Path:
        """Where ranks hand in their memory."""
        return self.state_dir / "memory.sock"

    @property
    def notice_socket(self) -> Path:
        """Where notices come in."""
        return self.state_dir / "notices.sock"
