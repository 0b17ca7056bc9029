"""How long things may take and how many there may be."""

from dataclasses import dataclass, fields

from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of transfers in seconds, and bounds in number and share."""

    lease: float = 30.0
    """Seconds that a producer's blocks are held after the last renewal."""
    accept: float = 10.0
    """Seconds from an offer, and from a consumer's last renewal, until every consumer must have accepted."""
    transfer: float = 30.0
    """Seconds from offer and accept both present until every byte must have landed."""
    fence: float = 5.0
    """Seconds that a fence waits for operations before their session is torn down."""
    quarantine: float = 0.5
    """Share of an engine's blocks that fences may keep; while they keep more, each has a tenth of `fence`."""
    park: float = 30.0
    """Seconds that an accept waits for its producer's first word, from the producer's last renewal."""
    tie: float = 2.0
    """Seconds that two full pools may wait for each other before the youngest offer is given up."""
    max_parked: int = 4096
    """Transfers of which only consumers are here; also lists of chunks whose handle is unknown."""
    max_transfers: int = 65_536
    """Open transfers."""
    max_remembered: int = 65_536
    """Ended transfers, and ended handles, that are remembered."""

    @property
    def renew(self) -> float:
        """Seconds between the renewals of a service that still has a request."""
        return min(self.lease, self.accept, self.park) / 3

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} must be above 0, not {getattr(self, field.name)}")
