"""What kvd needs of a way to move bytes.

Contracts:
- `Session.start` copies in the background and never waits. Every `Copy` it gives becomes terminal:
  by moving everything, by failing, or, after `cancel` or the session's `close`, early.
- Once `Copy.wait` has returned or raised, nothing of that copy reads or writes any more.
- `Session.close` returns when all its copies are terminal; it is safe twice.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdserve.kvd.plan import Runs
from pdserve.kvd.types import DeviceMemory, MemoryKind, RegionKey


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
    """Where it begins in the daemon's arena; 0 for device memory, which its transport finds by the key."""


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """One rank's memory on another node, as that node's daemon described it."""

    key: RegionKey
    kind: MemoryKind
    size: int
    card: bytes
    """How to reach it, in the words of the transport: `Reaching.card` of the other side."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a copy did. `cancelled`: it ended early, because it was asked to."""

    nbytes: int
    ns: int
    cancelled: bool = False
    lanes: str = ""
    """What carried it, where the transport has a choice and tells."""


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


@runtime_checkable
class FarSession(Session, Protocol):
    """A session that may end by itself, as one with another node does."""

    @property
    def over(self) -> bool:
        """Whether it begins no copy any more; once it is, for ever. Its copies come to their ends all the same, and it
        is closed like another."""
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


@runtime_checkable
class TakesDevices(Transport, Protocol):
    """A transport that maps device memory by itself."""

    async def take(self, region: MappedRegion, memory: DeviceMemory) -> None:
        """Maps a rank's memory and makes ready for its first copy. Cancelled before it returns, it leaves nothing
        mapped.

        Raises:
            InvalidRequest: the memory is not what it says, or lies on a device that this daemon does not see.
        """
        ...

    async def give_back(self, region: MappedRegion) -> None:
        """Unmaps it; sessions with it are closed before. Safe twice, and for one that was never taken."""
        ...

    def announced(self, key: RegionKey, step: int, layer: int | None) -> None:
        """A rank has told that its device computes a layer of a step, or (None) all that are left: copies that begin
        from now on wait until it has. Unknown ranks are ignored."""
        ...


class Reaching(Transport, Protocol):
    """A transport that also reaches other nodes. Bytes are always fetched by the side that they go to: it alone
    knows when its memory is not written any more, also when the other side is gone."""

    async def card(self, region: MappedRegion) -> bytes:
        """What another node needs to read a region of this one; registers the memory, once. Asked again, it is another
        one where the last leads nowhere any more.

        Raises:
            TransferFailed: the region cannot be registered.
        """
        ...

    async def forget(self, region: MappedRegion) -> None:
        """Takes a registration back before the region is unmapped; sessions with it are closed before. Safe twice."""
        ...

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> FarSession:
        """A new session from another node's region to one of this node. Cancelled before it returns, it leaves
        nothing open.

        Raises:
            TransferFailed: the other node cannot be reached, or the card is not this transport's.
        """
        ...
