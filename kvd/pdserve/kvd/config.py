"""Settings of the daemon: checked once, at its start."""

import enum
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdserve.kvd.limits import Limits
from pdserve.kvd.peers.config import NO_PEERS, PeerConfig
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.config import INSECURE_KEY, NO_METRICS, ClusterKey, MetricsConfig, check_socket_path, is_local

INSECURE_LOOPBACK_KEY: Final = INSECURE_KEY
"""What is signed with where no cluster key was given; fit for one host only."""


class TransportName(enum.Enum):
    """The transports that a daemon can be told to use."""

    SHM = "shm"
    SIM = "sim"
    NIXL = "nixl"
    MORI = "mori"
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


class MoriBackend(enum.Enum):
    """Backends of mori that kvd uses. It has no other that works: its TCP is a name only."""

    RDMA = "rdma"
    """Between nodes, over an RDMA device: host memory, and GPUs' where their driver allows it."""
    XGMI = "xgmi"
    """Between the GPUs of a node."""


@dataclass(frozen=True, slots=True)
class MoriConfig:
    """The reads from other nodes over mori."""

    backend: MoriBackend = MoriBackend.RDMA
    """What mori moves bytes by."""
    host: str = "127.0.0.1"
    """IPv4 address, of a private network's interface, that mori's control port is bound to and that other nodes call:
    whoever reaches that port may read all of the KV memory."""
    devices: str = ""
    """MORI_RDMA_DEVICES of the mori processes: the devices that mori may use, as "mlx5_0"; its choice where empty."""
    stall: float = 5.0
    """Seconds without a byte from a peer until its copies fail and the process that reads from it is ended."""
    connect: float = 5.0
    """Seconds that mori may wait for a peer's control port."""
    start: float = 30.0
    """Seconds within which a mori process must be up, and within which it must answer."""
    idle: float = 2.0
    """Seconds without work after which a mori process is stopped, until it has some: mori's own thread never sleeps."""
    spin: bool = False
    """Leaves mori processes running when they have no work; each then uses a whole core all the time."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for name in ("stall", "connect", "start", "idle"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"mori {name} must be above 0, not {getattr(self, name)}")
        if self.connect >= self.start:
            raise ConfigError(f"mori start ({self.start}) must be above mori connect ({self.connect})")
        try:
            address = ipaddress.IPv4Address(self.host)
        except ValueError as error:
            raise ConfigError(f"mori host must be an IPv4 address, which mori binds, not {self.host!r}") from error
        if not address.is_private or address.is_unspecified or address.is_multicast or address.is_reserved:
            raise ConfigError(
                f"mori host must be the address of a private network's interface, not {self.host}: "
                "whoever reaches mori's control port may read all of the KV memory"
            )

    @property
    def is_local(self) -> bool:
        """Whether other nodes cannot call its control port."""
        return ipaddress.IPv4Address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class KvdConfig:
    """The daemon of a node."""

    state_dir: Path
    """Folder of its sockets and its lock; made if missing, only its owner may enter."""
    socket: Path | None = None
    """Unix socket of its gRPC services; kvd.sock in the state folder where not given."""
    transport: TransportName = TransportName.SHM
    """How bytes move: shm copies between mappings, sim adds the bandwidth and delay of --sim-*, nixl and mori are shm
    with nixl or mori to other nodes, gpu_ipc is shm with copies between memory of this node's devices."""
    sim: SimConfig = SimConfig()
    """The link of transport sim."""
    nixl: NixlConfig = NixlConfig()
    """The reads of transport nixl."""
    mori: MoriConfig = MoriConfig()
    """The reads of transport mori."""
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
    allow_uid: tuple[int, ...] = ()
    """Further users, by number, whose processes may hand in memory and send notices; root and kvd's own may. Repeat it
    for several. Letting them into the folder and its sockets is left to whoever starts kvd."""
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
        alone = self.transport is TransportName.MORI and self.mori.is_local
        if alone and self.peer.on and not is_local(self.peer.bind[0]):
            raise ConfigError(f"other nodes cannot call mori at {self.mori.host}: give --mori-host")
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
