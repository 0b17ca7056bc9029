"""How an attachment behaves when kvd is away."""

from dataclasses import dataclass

from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttachConfig:
    """All in seconds."""

    welcome_timeout: float = 2.0
    """Longest wait for kvd's answer to a hello."""
    reconnect_deadline: float = 5.0
    """After so long without a stream, every open handle ends with KVD_UNAVAILABLE. Must be longer
    than kvd's own grace (2 s), after which it fences what a lost participant had open."""
    backoff_first: float = 0.02
    """Pause before the first new attempt; doubled by each that fails."""
    backoff_most: float = 0.5
    """Longest pause between attempts."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for name in ("welcome_timeout", "reconnect_deadline", "backoff_first", "backoff_most"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
