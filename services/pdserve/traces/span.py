"""A span as the store keeps it: plain values, free of OTLP's and of Jaeger's shapes."""

from dataclasses import dataclass
from typing import Any

Attributes = dict[str, Any]
"""What JSON can hold; bytes are {BYTES: base64}, a number that is not finite is its name."""

BYTES = "$bytes"
"""Key of the one-entry map that stands for bytes."""
UNSET, OK, ERROR = 0, 1, 2
"""Codes of a status, as OTLP numbers them."""
KINDS = ("", "internal", "server", "client", "producer", "consumer")
"""Names of a span's kinds, by OTLP's number."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a span."""

    service: str
    """service.name of the resource."""
    instance: str
    """service.instance.id of the resource."""
    resource: Attributes
    """All attributes of the resource, those two too."""
    scope: str = ""
    """Name of the instrumentation scope."""
    version: str = ""
    """Of the scope."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something at one moment of a span."""

    time_ns: int
    name: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that this one has to do with."""

    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids are hexadecimal digits, times nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has no parent."""
    name: str
    origin: Origin
    start_ns: int
    end_ns: int
    kind: int = 1
    """Index into KINDS."""
    status: int = UNSET
    message: str = ""
    """Of the status."""
    state: str = ""
    """W3C tracestate."""
    attributes: Attributes | None = None
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def tags(self) -> Attributes:
        """Its attributes."""
        return self.attributes or {}

    @property
    def start_us(self) -> int:
        """Whole microseconds since the epoch, as Jaeger counts."""
        return self.start_ns // 1000

    @property
    def duration_us(self) -> int:
        """Whole microseconds, from its start's to its end's: who ends with its parent ends with it so too."""
        return self.end_ns // 1000 - self.start_us
