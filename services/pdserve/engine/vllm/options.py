"""What the service tells the connector in the engine's processes; rides in vLLM's
kv_connector_extra_config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """One engine's."""

    engine_id: str
    """The engine's epoch, fresh at every start."""
    kvd_socket: str
    """Path of kvd's gRPC socket."""
    ranks: int
    """Tensor-parallel ranks."""
    identity: dict[str, str]
    """What is known before the ranks have their memory."""
    report: str
    """Folder for `startup.StartReport`."""
    memory: str = "host"
    """Where the ranks' KV lies: a value of kvd's MemoryKind."""

    def encode(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> "ConnectorOptions":
        """Raises ConfigError for unknown or missing names: someone else configured the connector."""
        if odd := sorted(set(values) ^ {field.name for field in fields(cls)}):
            raise ConfigError(f"KvdConnector is configured by pdserve's services only; unknown or missing: {odd}")
        return cls(**values)
