"""The settings of `pdserve-traces`."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.rpc.errors import ConfigError

MIN_BYTES = 4 << 20
_LARGEST_EXPORT = 4 << 20
_EXPORT_SHARE = 32


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """The trace store."""

    host: str = "127.0.0.1"
    """Address to listen on, for both ports."""
    otlp_port: int = 4317
    """OTLP over gRPC; 0 takes a free one."""
    port: int = 16686
    """HTTP: page, Jaeger's query API, our own; 0 takes a free one."""
    file: Path | None = None
    """The store. Default: traces.sqlite in $XDG_STATE_HOME/pdserve, else ~/.local/state/pdserve."""
    max_bytes: int = 256 << 20
    """Bytes that the file and its log may have; the oldest traces are taken out."""
    max_age: float = 7 * 24 * 3600.0
    """Seconds after which a trace is taken out."""
    drain_timeout: float = 5.0
    """Seconds that open exports get after the first SIGTERM."""

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work."""
        for name in ("otlp_port", "port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} is {getattr(self, name)}, not in 0..65535")
        if self.max_bytes < MIN_BYTES:
            raise ConfigError(f"max_bytes is {self.max_bytes}, at least {MIN_BYTES} are needed")
        if not 0 < self.max_age < 1e10:
            raise ConfigError(f"max_age is {self.max_age}, it must be above 0 and below 1e10 seconds")
        if self.drain_timeout < 0:
            raise ConfigError(f"drain_timeout is {self.drain_timeout}, it must not be negative")

    @property
    def path(self) -> Path:
        """The file, absolute."""
        if self.file is not None:
            return self.file.expanduser().absolute()
        state = os.environ.get("XDG_STATE_HOME")
        return (Path(state) if state else Path.home() / ".local" / "state") / "pdserve" / "traces.sqlite"

    @property
    def max_export(self) -> int:
        """Bytes of the largest Export: small beside the store, since it must fit while older ones are taken out."""
        return min(_LARGEST_EXPORT, self.max_bytes // _EXPORT_SHARE)
