"""What the core tells its surroundings to do. Values only."""

from dataclasses import dataclass

from pdserve.kvd.client.messages import End, Fenced, Outcome
from pdserve.kvd.types import Mode, RegionKey


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an end did not succeed."""

    outcome: Outcome
    reason: str
    """UPPER_SNAKE, a reason of pdserve.rpc.errors."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tell:
    """A message for every participant of an engine: one `End` per handle, `Fenced` as asked."""

    engine_id: str
    message: End | Fenced
    again: bool = False
    """The handle's one end, told again to an engine that seems not to know it."""
    mode: Mode | None = None
    """Of an `End`'s transfer; None where none was made for its handle."""


@dataclass(frozen=True, slots=True)
class Post:
    """Copy blocks of some layers; answered by exactly one `op_ended`, whatever happens. One block of either side for
    each unit (see `reshard`), in the prompt's order."""

    op_id: int
    transfer_id: bytes
    src: RegionKey
    dst: RegionKey
    layers: tuple[int, ...]
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    first: int = 0
    """The first unit's number in the prompt, which says where in its blocks it lies."""


@dataclass(frozen=True, slots=True)
class CancelOp:
    """What was not copied yet need not be; `op_ended` is still owed."""

    op_id: int


@dataclass(frozen=True, slots=True)
class TearDown:
    """A fence ran past its deadline: close the sessions of these operations, so that they end."""

    op_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmap:
    """Nothing touches this ended engine's memory any more."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Note:
    """For the log: an event by name, with what belongs to it."""

    event: str
    transfer_id: bytes
    facts: tuple[tuple[str, object], ...] = ()


Effect = Tell | Post | CancelOp | TearDown | Unmap | Note
