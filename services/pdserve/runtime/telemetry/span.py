"""A finished span and what hangs on it, as values: what is exported, by whatever."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Value = str | bool | int | float | tuple[str, ...]
"""Of an attribute."""


class Kind(enum.Enum):
    """Which side of a call a span is; as OpenTelemetry has them."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Service:
    """Whose span it is."""

    name: str
    instance_id: str = ""
    """Empty: there is but one, or it is not known."""


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    at_ns: int
    """Epoch."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that this one has to do with."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Status:
    """Whether what the span is about went well."""

    failed: bool = False
    message: str = ""
    """Why it did not."""


WELL: Final = Status()


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of one trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits, as the parent's."""
    parent_id: str
    """Empty: the root."""
    name: str
    service: Service
    start_ns: int
    """Epoch."""
    end_ns: int
    kind: Kind = Kind.INTERNAL
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    links: tuple[Link, ...] = ()
    status: Status = WELL
    remote_parent: bool = False
    """The parent is another process's own span."""


Export = Callable[[Sequence[Span]], None]
"""Takes the spans of one trace, to be sent some time later; neither blocks nor raises."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What has become of spans since the start."""

    exported: int
    """The collector has taken them."""
    dropped: int
    """There was no room for them; whole traces."""
    failed: int
    """The collector was away, or refused them; or who was to send them has died."""
    undrawn: int = 0
    """Of whole requests: no trace could be drawn of them, so that nobody knows how many spans are missing."""
