"""Whether a daemon has peers, and how they prove who they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.kvd.peers.links import LinkLimits
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.config import ClusterKey, is_local, join_address, split_address

_WILD: Final = ("0.0.0.0", "::", "*")  # refused as an address, not bound


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Other nodes' daemons."""

    listen: str = ""
    """HOST:PORT to be called at by daemons of other nodes; port 0 takes a free one. Without it there are no peers."""
    address: str = ""
    """HOST:PORT under which they reach it, where that is not what it listens at; travels in locators."""
    tls_cert: Path | None = None
    """Certificate (PEM) that it shows to peers, for the host of its address; with key and ca: mutual TLS."""
    tls_key: Path | None = None
    """Key of the certificate (PEM)."""
    tls_ca: Path | None = None
    """Certificates (PEM) that peers' own must be signed by."""
    connect: float = 5.0
    """Seconds within which a peer must have been reached before what waits for it fails."""
    silence: float = 6.0
    """Seconds without a word from a peer, which speaks every second, until its stream is taken for gone."""
    strangers: int = 32
    """Streams that have not proved yet that they are of the cluster; further ones are refused."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise ConfigError("TLS between daemons needs all of --peer-tls-cert, --peer-tls-key and --peer-tls-ca")
        for name in ("connect", "silence", "strangers"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"peer-{name} must be above 0, not {getattr(self, name)}")
        if not self.listen:
            if self.address or any(tls):
                raise ConfigError("--peer-address and --peer-tls-* are for a daemon with --peer-listen")
            return
        host, _ = self.bind
        if self.address:
            split_address(self.address)
        elif host in _WILD:
            raise ConfigError(f"{self.listen} is no address to call: give --peer-address")

    @property
    def on(self) -> bool:
        """Whether there are peers."""
        return bool(self.listen)

    @property
    def tls(self) -> bool:
        """Whether streams are encrypted, and both sides shown to be who they are."""
        return self.tls_cert is not None

    @property
    def bind(self) -> tuple[str, int]:
        """Host and port to bind."""
        host, colon, port = self.listen.rpartition(":")
        if colon and port == "0" and host:
            return host.strip("[]"), 0
        return split_address(self.listen)

    def advertised(self, port: int) -> str:
        """What other nodes call, where `port` was bound."""
        return self.address or join_address(self.bind[0], port)

    def limits(self, grace: float) -> LinkLimits:
        """Of its links; `grace` in seconds, as for a lost Attach stream."""
        return LinkLimits(connect=self.connect, grace=grace, silence=self.silence)

    def check(self, key: ClusterKey, *, insecure: bool) -> None:
        """Refuses to open the daemon to the network without proof.

        Raises:
            ConfigError: other hosts could call without a cluster key, or in clear without `--insecure`.
        """
        if not self.on or is_local(self.bind[0]):
            return
        if not key.given:
            raise ConfigError(f"peers at {self.listen} prove themselves with the cluster key: give --cluster-key-file")
        if not self.tls and not insecure:
            raise ConfigError(
                f"peers at {self.listen} would be talked to in clear: give --peer-tls-cert, --peer-tls-key and "
                "--peer-tls-ca, or --insecure to do it without"
            )


NO_PEERS: Final = PeerConfig()
"""One node alone."""
