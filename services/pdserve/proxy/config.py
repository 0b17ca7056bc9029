"""The proxy's settings. Each field is a flag of `pdserve-proxy`; see pdserve.runtime.flags."""

from dataclasses import dataclass

from pdserve.proxy.types import Mode, OnFailure, Route
from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """How the proxy listens, admits and drives requests."""

    host: str = "127.0.0.1"
    """Address to bind for all three ports."""
    grpc_port: int = 0
    """Port of the gRPC API; 0 takes a free one."""
    http_port: int = 0
    """Port of the OpenAI HTTP API; 0 takes a free one."""
    ping_port: int = 0
    """Port at which engines register (ZMQ); 0 takes a free one."""
    mode: Mode = Mode.READ
    """How KV is handed over where a request does not say."""
    route: Route = Route.SPLIT
    """Which engines may serve a request that does not say."""
    on_failure: OnFailure = OnFailure.RECOMPUTE
    """What to do when a hand-over fails and the request does not say."""
    tokenizer: tuple[str, ...] = ()
    """NAME=FOLDER: tokenizer of a model, where the engine's own folder is not on this host."""
    admission_queue: int = 1024
    """Most requests that wait for credits."""
    admission_timeout: float = 10.0
    """Seconds that a request waits for credits."""
    admission_headroom: int = 256
    """Tokens of each answer that are reserved with its prompt."""
    hold_timeout: float = 5.0
    """Seconds that a request is held while no engines could serve it, as when the only one is replaced; all its waits
    for engines together. 0: it is refused at once."""
    hold_queue: int = 256
    """Most requests that are held."""
    beat_interval: float = 1.0
    """Seconds between the beats of an engine."""
    beats_settle: int = 3
    """Beats from the proxy's first one on in which a model that it has not heard of is waited for like an engine: who
    serves it may not have found this proxy yet. 0: such a model is unknown at once."""
    beats_missed: int = 3
    """Missed beats until an engine is evicted."""
    beats_stalled: int = 30
    """Beats with a standing step counter, while work waits, until an engine is evicted; one step of a
    long prompt may take many seconds on a CPU."""
    retries: int = 2
    """Attempts on other engines after the first, before the first token."""
    continuations: int = 2
    """Times that an answer which has begun may be taken up by other engines; 0: never."""
    recomputes: int = 4
    """Prompts that may be computed again at decode engines at once."""
    request_timeout: float = 600.0
    """Seconds that a request may take; a client may ask for less."""
    handover_grace: float = 2.0
    """Seconds that decode gets to notice that its producer is gone, before it is cut off."""
    release_timeout: float = 60.0
    """Seconds after its offer until a producer must have been released."""
    drain_timeout: float = 30.0
    """Seconds that open requests get after the first SIGTERM."""
    max_n: int = 16
    """Most answers per prompt."""
    max_logprobs: int = 20
    """Most candidates per position."""
    max_stop: int = 16
    """Most stop strings, and most stop tokens."""
    max_body: int = 64 << 20
    """Bytes of the longest HTTP request."""
    trace_ratio: float | None = None
    """Share of requests that are traced, 0 to 1, where the caller has not decided; without it
    OTEL_TRACES_SAMPLER and its argument say it, else all are. What failed or was tried elsewhere always is."""
    trace_slow: float = 10.0
    """Seconds to the first byte from which on a request is always traced; 0: none for that."""

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work."""
        for name in ("grpc_port", "http_port", "ping_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} is {getattr(self, name)}, not in 0..65535")
        for name in (
            "admission_queue", "admission_timeout", "hold_queue", "beat_interval", "beats_missed", "beats_stalled",
            "recomputes", "request_timeout", "handover_grace", "release_timeout", "max_n", "max_stop", "max_body",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be above 0")
        for name in (
            "admission_headroom", "hold_timeout", "beats_settle", "retries", "continuations", "drain_timeout",
            "max_logprobs", "trace_slow",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must not be negative")
        if self.trace_ratio is not None and not 0 <= self.trace_ratio <= 1:
            raise ConfigError(f"trace_ratio is {self.trace_ratio}, not in 0..1")
        self.tokenizer_folders()

    def tokenizer_folders(self) -> dict[str, str]:
        """Folders by model name.

        Raises:
            ConfigError: an entry is not NAME=FOLDER.
        """
        folders: dict[str, str] = {}
        for entry in self.tokenizer:
            name, equals, folder = entry.partition("=")
            if not (name and equals and folder):
                raise ConfigError(f"tokenizer {entry!r} is not NAME=FOLDER")
            folders[name] = folder
        return folders
