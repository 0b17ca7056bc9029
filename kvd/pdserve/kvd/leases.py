"""Who holds which blocks until when, counted in distinct blocks. Pure: the time is an argument.

A lease covers the same block ids on every rank of one engine. A block of a shared prefix may be
under several leases; it is free when the last of them ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class IntegrityError(Exception):
    """A defect of kvd itself: the books do not add up."""


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks held for one end of one transfer (and, of a producer, one attempt)."""

    lease_id: int
    engine_id: str
    transfer_id: bytes
    writable: bool
    """Whether kvd may write to the blocks: a consumer's."""
    granted_at: float
    expires_at: float | None
    """None: bounded by the transfer's deadline instead."""
    block_ids: list[int] = field(default_factory=list)
    in_flight: int = 0
    """Operations that read or write the blocks now."""
    quarantined_at: float | None = None
    """Since when a fence keeps the blocks."""
    released: bool = False

    @property
    def quarantined(self) -> bool:
        """Whether a fence keeps the blocks."""
        return self.quarantined_at is not None


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Distinct blocks of one engine by state; a block counts under its gravest state."""

    free: int
    leased: int
    in_flight: int
    quarantined: int

    @property
    def total(self) -> int:
        """All four."""
        return self.free + self.leased + self.in_flight + self.quarantined


class Leases:
    """Every lease of the node. `free` is counted by reference counts, the rest from the leases,
    so that `check` compares two books."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._holds: dict[str, dict[int, int]] = {}
        """engine -> block -> leases that hold it."""
        self._written: dict[str, dict[int, int]] = {}
        """engine -> block -> lease_id of the consumer that it is filled for."""
        self._per_engine: dict[str, int] = {}
        self._next = 1

    def held_by(self, engine_id: str) -> int:
        """Leases on one engine's blocks."""
        return self._per_engine.get(engine_id, 0)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def conflict(self, engine_id: str, block_ids: Sequence[int], *, writable: bool) -> str:
        """Why these blocks cannot be held now; empty when they can.

        Blocks to be written must be under no other lease; blocks to be read must not be written.
        """
        written = self._written.get(engine_id, {})
        for block in block_ids:
            if block in written:
                return f"block {block} is being filled for another transfer"
        if writable:
            if len(set(block_ids)) != len(block_ids):
                return "a block is named twice"
            holds = self._holds.get(engine_id, {})
            for block in block_ids:
                if block in holds:
                    return f"block {block} is held for another transfer"
        return ""

    def grant(
        self,
        engine_id: str,
        transfer_id: bytes,
        block_ids: Sequence[int],
        *,
        writable: bool,
        now: float,
        ttl: float | None,
    ) -> Lease:
        """A new lease; the caller has asked `conflict` first."""
        lease = Lease(self._next, engine_id, transfer_id, writable, now, None if ttl is None else now + ttl)
        self._next += 1
        self._leases[lease.lease_id] = lease
        self._per_engine[engine_id] = self.held_by(engine_id) + 1
        self.extend(lease, block_ids)
        return lease

    def extend(self, lease: Lease, block_ids: Sequence[int]) -> None:
        """Adds blocks to a lease.

        Raises:
            IntegrityError: it was released.
        """
        if lease.released:
            raise IntegrityError(f"lease {lease.lease_id} was released")
        lease.block_ids.extend(block_ids)
        holds = self._holds.setdefault(lease.engine_id, {})
        for block in block_ids:
            holds[block] = holds.get(block, 0) + 1
        if lease.writable:
            written = self._written.setdefault(lease.engine_id, {})
            written.update((block, lease.lease_id) for block in block_ids)

    def renew(self, lease: Lease, now: float, ttl: float) -> None:
        """Moves the expiry; a lease in quarantine is not given more time."""
        if not lease.released and not lease.quarantined and lease.expires_at is not None:
            lease.expires_at = now + ttl

    def release(self, lease: Lease) -> None:
        """Gives the blocks back; safe twice.

        Raises:
            IntegrityError: something still reads or writes them.
        """
        if lease.released:
            return
        if lease.in_flight:
            raise IntegrityError(f"lease {lease.lease_id} released under {lease.in_flight} operations")
        lease.released = True
        del self._leases[lease.lease_id]
        self._per_engine[lease.engine_id] -= 1
        holds = self._holds[lease.engine_id]
        for block in lease.block_ids:
            holds[block] -= 1
            if not holds[block]:
                del holds[block]
        if lease.writable:
            written = self._written[lease.engine_id]
            for block in lease.block_ids:
                del written[block]

    def forget_engine(self, engine_id: str) -> None:
        """Drops the empty books of an engine that has ended.

        Raises:
            IntegrityError: a lease of it is not released; its books stay, so that it still can be.
        """
        if self.held_by(engine_id) or self._holds.get(engine_id) or self._written.get(engine_id):
            raise IntegrityError(f"engine {engine_id} is forgotten while blocks of it are held")
        for book in (self._per_engine, self._holds, self._written):
            book.pop(engine_id, None)

    def counts(self, engine_id: str, num_blocks: int) -> BlockCounts:
        """Blocks of one engine by state, of `num_blocks` in all."""
        quarantined: set[int] = set()
        in_flight: set[int] = set()
        leased: set[int] = set()
        for lease in self._leases.values():
            if lease.engine_id == engine_id:
                bucket = quarantined if lease.quarantined else in_flight if lease.in_flight else leased
                bucket.update(lease.block_ids)
        in_flight -= quarantined
        leased -= quarantined | in_flight
        free = num_blocks - len(self._holds.get(engine_id, {}))
        return BlockCounts(free, len(leased), len(in_flight), len(quarantined))

    def check(self, engine_id: str, num_blocks: int) -> None:
        """Raises IntegrityError unless free + leased + in flight + quarantined = total."""
        counts = self.counts(engine_id, num_blocks)
        if counts.total != num_blocks:
            raise IntegrityError(f"{engine_id}: {counts} of {num_blocks} blocks")
