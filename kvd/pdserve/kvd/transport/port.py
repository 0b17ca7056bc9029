"""What kvd needs of a way to move bytes.

Contracts:
- `Session.start` copies in the background and never waits. Every `Copy` it gives becomes terminal:
  by moving everything, by failing, or, after `cancel` or the session's `close`, early.
- Once `Copy.wait` has returned or raised, nothing of that copy reads or writes any more.
- `Session.close` returns when all its copies are terminal; it is safe twice.
"""

from dataclasses import dataclass
from typing import Protocol

from pdserve.kvd.plan import Runs
from pdserve.kvd.types import MemoryKind, RegionKey


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, for the choice between them."""

    name: str
    kinds: frozenset[MemoryKind]
    """Memory kinds that it can read and write."""
    same_node: bool
    """Between regions that this daemon has mapped."""
    other_node: bool = False


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """One rank's memory as this daemon sees it."""

    key: RegionKey
    kind: MemoryKind
    size: int
    offset: int
    """Where it begins in the daemon's arena."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a copy did. `cancelled`: it ended early, because it was asked to."""

    nbytes: int
    ns: int
    cancelled: bool = False


class Copy(Protocol):
    """One copy under way."""

    def cancel(self) -> None:
        """Asks to end early; safe at any time."""
        ...

    async def wait(self) -> Moved:
        """Waits until the copy is terminal.

        Raises:
            TransferFailed: it did not move everything, and not because it was cancelled.
        """
        ...


class Session(Protocol):
    """A channel from one region to another."""

    def start(self, runs: Runs) -> Copy:
        """Begins to copy.

        Raises:
            TransferFailed: the session is closed, or a run leaves a region.
        """
        ...

    async def close(self) -> None:
        """Ends every copy and the session."""
        ...


class Transport(Protocol):
    """A way to move bytes."""

    @property
    def capabilities(self) -> Capabilities:
        """Fixed facts."""
        ...

    async def open(self, src: MappedRegion, dst: MappedRegion) -> Session:
        """A new session. Cancelled before it returns, it leaves nothing open.

        Raises:
            TransferFailed: it cannot reach one of the regions.
        """
        ...

    async def aclose(self) -> None:
        """Closes what it holds; its sessions are closed before."""
        ...
