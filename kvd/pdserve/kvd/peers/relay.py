"""The consumer's side of a transfer whose book another node's daemon keeps. Pure.

    accept ─▶ OPEN ─▶ end (LANDED, or the peer has fenced)
               └─ link lost, engine dead ─▶ FENCING ─▶ end

Here are the leases on this node's blocks and the operations that fill them: nothing is written but what the lease of
the handle covers, and no block is given back while an operation is in flight. What the engine says is passed on by
`Desk`; LANDED comes from the peer alone, so that what was fetched from a lost peer is never taken for good.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pdserve.kvd.book import Book, Handle
from pdserve.kvd.client.messages import Accept, End, Facts, Outcome
from pdserve.kvd.consuming import Source
from pdserve.kvd.effects import CancelOp, Note, Post, Stop, TearDown
from pdserve.kvd.endings import Endings
from pdserve.kvd.fences import Fence
from pdserve.kvd.intake import MAX_HANDLE, Intake, failed
from pdserve.kvd.leases import IntegrityError
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.messages import OpEnded, PostOp
from pdserve.kvd.peers.relayed import RelayedEnd
from pdserve.kvd.timers import Timers
from pdserve.kvd.types import TRANSFER_ID_BYTES, Mode, RegionKey
from pdserve.rpc import errors


@dataclass(frozen=True, slots=True)
class _Op:
    end: RelayedEnd
    theirs: int
    """The peer's name for it."""


class Relay:
    """See the module. Leaves its effects in the book, like the rest of the core."""

    def __init__(self, book: Book, intake: Intake, endings: Endings) -> None:
        self._book = book
        self._intake = intake
        self._endings = endings
        self._ends: dict[Handle, RelayedEnd] = {}
        self._by_transfer: dict[bytes, list[RelayedEnd]] = {}
        self._ops: dict[int, _Op] = {}
        self._names: dict[tuple[Link, int], int] = {}
        """A peer's operation -> ours."""
        self._timers: Timers[Handle] = Timers()

    def __iter__(self) -> Iterator[RelayedEnd]:
        return iter(self._ends.values())

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, engine_id: str, handle: str) -> RelayedEnd | None:
        """A handle's end while it is open."""
        return self._ends.get((engine_id, handle))

    def of_transfer(self, transfer_id: bytes) -> list[RelayedEnd]:
        """The open ends of a transfer."""
        return self._by_transfer.get(transfer_id, [])

    def mode(self, op_id: int) -> Mode:
        """Of an operation's transfer."""
        return self._ops[op_id].end.mode

    # -- coming in --------------------------------------------------------------------------

    def known(self, engine_id: str, message: Accept) -> Literal["live", "over"] | None:
        """Whether an accept was heard before; an ended one's end is told again.

        Raises:
            InvalidRequest: the handle is another end's, or none at all.
        """
        end = self._ends.get((engine_id, message.handle))
        if end is None:
            if (engine_id, message.handle) in self._book.handles:
                raise errors.InvalidRequest(f"handle {message.handle} is in use for another end")
            return "over" if self._over(engine_id, message.handle) else None
        if end.transfer_id != message.transfer_id:
            raise errors.InvalidRequest(f"handle {message.handle} is in use for another end")
        return "live"

    def accept(self, engine_id: str, message: Accept, source: Source, link: Link, now: float) -> bool:
        """Takes blocks in lease for a consumer; whether the peer is to hear of it. A refusal is told at once."""
        stop = self._refused(engine_id, message)
        if stop is not None:
            self._intake.end_at_once(
                engine_id, message.handle, message.transfer_id, stop, producer=False, consumer=message.consumer
            )
            return False
        lease = self._book.leases.grant(
            engine_id, message.transfer_id, message.block_ids, writable=True, now=now, ttl=None
        )
        end = RelayedEnd(
            engine_id,
            message.handle,
            message.transfer_id,
            message.consumer,
            source.mode,
            source.engine_id,
            link,
            lease,
            message.stamped_ns,
            now,
        )
        self._ends[end.key] = end
        self._by_transfer.setdefault(end.transfer_id, []).append(end)
        return True

    def _over(self, engine_id: str, handle: str) -> bool:
        if not 0 < len(handle) <= MAX_HANDLE or (engine_id, handle) not in self._book.ended_handles:
            return False
        self._intake.tell_again(engine_id, handle)
        return True

    def _refused(self, engine_id: str, message: Accept) -> Stop | None:
        if not 0 < len(message.handle) <= MAX_HANDLE:
            raise errors.InvalidRequest(f"a handle of {len(message.handle)} characters; 1 to {MAX_HANDLE}")
        if len(message.transfer_id) != TRANSFER_ID_BYTES:
            return failed(errors.InvalidRequest, f"a transfer_id of {len(message.transfer_id)} bytes")
        tomb = self._book.tombs.get(message.transfer_id)
        if tomb is not None and tomb.stop is not None:
            return tomb.stop  # it was given up here before it was accepted
        if (stop := self._intake.no_room(len(self._ends))) is not None:
            return stop
        entry = self._book.registry.live(engine_id)
        problem = self._book.leases.conflict(engine_id, message.block_ids, writable=True)
        if not problem and entry.mapped and message.block_ids and max(message.block_ids) >= entry.num_blocks:
            problem = f"block {max(message.block_ids)} of {entry.num_blocks}"
        return failed(errors.InvalidRequest, problem) if problem else None

    # -- operations -------------------------------------------------------------------------

    def post(self, link: Link, post: PostOp) -> OpEnded | None:
        """The peer wants blocks fetched; its answer where that is refused."""
        end = self._ends.get((post.engine_id, post.handle))
        error = ""
        if end is None or end.link is not link or end.transfer_id != post.transfer_id or end.last is not None:
            error = "the handle does not take blocks any more"
        elif post.source != end.source:
            error = f"engine {post.source} does not produce this transfer"
        elif not set(post.dst_blocks) <= set(end.lease.block_ids) or len(post.src_blocks) != len(post.dst_blocks):
            error = "blocks that were not accepted under the handle"
        elif (link, post.op_id) in self._names:
            error = "an operation of this name is in flight"
        if error or end is None:
            self._book.out.append(Note("peer_post_refused", post.transfer_id, (("error", error), ("peer", link.name))))
            return OpEnded(post.op_id, error=error)
        op_id = self._book.next_op
        self._book.next_op += 1
        self._ops[op_id] = _Op(end, post.op_id)
        self._names[link, post.op_id] = op_id
        end.ops.add(op_id)
        end.lease.in_flight += 1
        src, dst = RegionKey(post.source, post.source_rank), RegionKey(post.engine_id, post.rank)
        self._book.out.append(
            Post(op_id, post.transfer_id, src, dst, post.layers, post.src_blocks, post.dst_blocks, post.first)
        )
        return None

    def cancel_op(self, link: Link, theirs: int) -> OpEnded | None:
        """The peer does not need the rest of an operation; its answer where that is over, which the peer may not
        have heard."""
        op_id = self._names.get((link, theirs))
        if op_id is None:
            return OpEnded(theirs, error="the operation is over")
        self._book.out.append(CancelOp(op_id))
        return None

    def tear_down(self, link: Link, theirs: tuple[int, ...]) -> list[OpEnded]:
        """The peer's fence is overdue; answers for what is over."""
        ops = sorted(self._names[link, op_id] for op_id in theirs if (link, op_id) in self._names)
        if ops:
            self._book.out.append(TearDown(tuple(ops)))
        return [OpEnded(op_id, error="the operation is over") for op_id in theirs if (link, op_id) not in self._names]

    def owns(self, op_id: int) -> bool:
        """Whether an operation is one of these."""
        return op_id in self._ops

    def op_ended(
        self, op_id: int, now: float, *, moved: int, ns: int, transport: str, lanes: str, error: str
    ) -> tuple[Link, OpEnded] | None:
        """An operation is terminal; whom to tell what, where there is somebody to tell."""
        op = self._ops.pop(op_id)
        end = op.end
        del self._names[end.link, op.theirs]
        end.ops.discard(op_id)
        end.lease.in_flight -= 1
        end.bytes_fetched += moved
        if transport:
            end.transport, end.lanes = transport, lanes or end.lanes
        self._fenced(end, now)
        return None if end.cut else (end.link, OpEnded(op.theirs, moved, ns, transport, error, lanes))

    # -- ending -----------------------------------------------------------------------------

    def ended(self, link: Link, engine_id: str, end: End, now: float) -> None:
        """The peer has ended a handle."""
        mine = self._ends.get((engine_id, end.handle))
        if mine is None or mine.link is not link or mine.last is not None:
            return  # said again, or given up here meanwhile
        if mine.ops and end.outcome.good:
            detail = "its peer called the transfer done under copies in flight"
            self._stop(mine, failed(errors.TransferFailed, detail), now)
        else:
            self._stop(mine, end, now)

    def link_lost(self, link: Link, error: errors.PdserveError, now: float) -> None:
        """Nothing can be heard of these transfers any more."""
        for end in [end for end in self._ends.values() if end.link is link]:
            end.cut = True
            self._stop(end, Stop(Outcome.FAILED, error.reason, error.message), now)

    def engine_ended(self, engine_id: str, detail: str, now: float) -> None:
        """An engine of this node is dead; its peers are told by `Desk`."""
        for end in [end for end in self._ends.values() if end.engine_id == engine_id]:
            self._stop(end, failed(errors.EngineDied, detail), now)

    def _stop(self, end: RelayedEnd, last: End | Stop, now: float) -> None:
        if end.last is not None:
            return
        end.last = last
        end.fence = Fence(now, waits=bool(end.ops))
        end.lease.quarantined_at = now
        if end.ops:
            self._book.out.extend(CancelOp(op_id) for op_id in sorted(end.ops))
            self._timers.set(end.key, now + self._book.limits.fence)
        self._fenced(end, now)

    def _fenced(self, end: RelayedEnd, now: float) -> None:
        if end.last is None or end.ops:
            return
        assert end.fence is not None
        self._timers.clear(end.key)
        del self._ends[end.key]
        self._by_transfer[end.transfer_id].remove(end)
        if not self._by_transfer[end.transfer_id]:
            del self._by_transfer[end.transfer_id]
        self._book.leases.release(end.lease)
        if end.fence.waits or not (isinstance(end.last, End) and end.last.outcome.good):
            self._book.fences.over(end.fence, now)
        self._book.end_handle(end.engine_id, self._last_word(end, end.last), end.mode)
        self._endings.unmap_if_idle(end.engine_id)

    @staticmethod
    def _last_word(end: RelayedEnd, last: End | Stop) -> End:
        if isinstance(last, End):
            return last
        facts = Facts(kv_bytes=end.bytes_fetched, transport=end.transport, accepted_ns=end.accepted_ns, lanes=end.lanes)
        return End(end.handle, end.transfer_id, last.outcome, last.reason, last.detail, facts, consumer=end.consumer)

    # -- time -------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Tears down what keeps a fence past its deadline."""
        while (key := self._timers.pop_due(now)) is not None:
            end = self._ends[key]
            assert end.fence is not None
            self._book.fences.overdue(end.fence)
            self._book.out.append(TearDown(tuple(sorted(end.ops))))
            self._book.out.append(Note("fence_overdue", end.transfer_id, (("operations", len(end.ops)),)))
            self._timers.set(key, now + self._book.limits.fence)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self._timers.next()

    def put_off(self, seconds: float) -> None:
        """The daemon did not run for so long."""
        self._timers.postpone(seconds)

    def check(self) -> None:
        """Raises IntegrityError where the leases and the operations do not agree; for idle moments and tests."""
        for end in self._ends.values():
            if end.lease.released or end.lease.in_flight != len(end.ops):
                raise IntegrityError(f"{end.key}: {end.lease.in_flight} in flight, {len(end.ops)} operations")
        of_ends = sum(len(end.ops) for end in self._ends.values())
        if set(self._names.values()) != set(self._ops) or of_ends != len(self._ops):
            raise IntegrityError("operations for peers that belong to no open end")
