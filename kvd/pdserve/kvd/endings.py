"""How transfers end: stop, fence, then free, and one terminal event per handle. Pure.

Whatever stops an end first quarantines its blocks and asks its operations to end; its `End` is
sent, and its lease released, only when none is in flight. A fence that takes too long tears the
sessions down, which ends their operations; sooner where fences keep much of a pool (`crowding`).
"""

from pdserve.kvd.book import Book, Timer
from pdserve.kvd.client.messages import End, Facts, Outcome
from pdserve.kvd.crowding import hasten
from pdserve.kvd.effects import CancelOp, Note, Stop, TearDown, Unmap
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd, Tomb, Transfer
from pdserve.kvd.fences import Fence
from pdserve.kvd.states import Consumer, ConsumerEvent, Producer, ProducerEvent


class Endings:
    """See the module."""

    def __init__(self, book: Book) -> None:
        self._book = book

    # -- stopping ---------------------------------------------------------------------------

    def stop_transfer(self, transfer: Transfer, producer: Stop, others: Stop, now: float) -> None:
        """Gives the whole transfer up; ends that come later hear `others`."""
        if transfer.stop is None:
            transfer.stop = others
        if transfer.producer is not None:
            self._stop_producer(transfer, transfer.producer, producer, now)
        for consumer in list(transfer.consumers.values()):
            self.stop_consumer(transfer, consumer, others, producer, now)
        self._finish(transfer)

    def stop_consumer(self, transfer: Transfer, end: ConsumerEnd, stop: Stop, peer: Stop, now: float) -> None:
        """Gives one consumer up. The producer hears `peer` if that leaves it without any."""
        if end.terminal or end.stop is not None:
            return
        end.stop, end.peer_stop = stop, peer
        self._book.move_consumer(transfer, end, ConsumerEvent.STOP)
        end.lease.quarantined_at = now
        end.fence = Fence(now, waits=bool(end.ops))
        self._book.timers.clear(Timer("transfer", transfer.transfer_id, end.index))
        if end.ops:
            self._cancel(end.ops)
            self._book.timers.set(Timer("cfence", transfer.transfer_id, end.index), now + self._book.limits.fence)
            hasten(self._book, end.engine_id, now)
        self.consumer_fenced(transfer, end, now)

    def _stop_producer(self, transfer: Transfer, end: ProducerEnd, stop: Stop, now: float) -> None:
        if end.stop is not None or end.state is Producer.FREED:
            return
        end.stop = stop
        if end.state is not Producer.FENCING:
            self._book.move_producer(transfer, end, ProducerEvent.STOP)
            self._fence_producer(transfer, end, now)
        self.producer_fenced(transfer, now)

    def preempt(self, transfer: Transfer, end: ProducerEnd, attempt: int, now: float) -> None:
        """Takes an attempt's blocks back; `fenced` follows, then the next attempt."""
        end.fencing_attempt = attempt
        if end.state is not Producer.FENCING:
            self._book.move_producer(transfer, end, ProducerEvent.PREEMPT)
            self._fence_producer(transfer, end, now)
            for consumer in transfer.consumers.values():  # the transfer's time runs from the next offer
                self._book.timers.clear(Timer("transfer", transfer.transfer_id, consumer.index))
        self.producer_fenced(transfer, now)

    def _fence_producer(self, transfer: Transfer, end: ProducerEnd, now: float) -> None:
        end.lease.quarantined_at = now
        end.fence = Fence(now, waits=bool(end.lease.in_flight))
        self._book.timers.clear(Timer("lease", transfer.transfer_id))
        self._book.timers.clear(Timer("accept", transfer.transfer_id))
        if end.lease.in_flight:
            self._cancel(self._reading(end))
            self._book.timers.set(Timer("pfence", transfer.transfer_id), now + self._book.limits.fence)
            hasten(self._book, end.engine_id, now)

    # -- fences -----------------------------------------------------------------------------

    def producer_fenced(self, transfer: Transfer, now: float) -> None:
        """Goes on with a producer in FENCING once nothing reads its blocks."""
        end = transfer.producer
        if end is None or end.state is not Producer.FENCING or end.lease.in_flight:
            return
        book = self._book
        book.timers.clear(Timer("pfence", transfer.transfer_id))
        book.leases.release(end.lease)
        self._fence_over(end, now)
        attempt, end.fencing_attempt = end.fencing_attempt, None
        if end.stop is not None:
            book.move_producer(transfer, end, ProducerEvent.FREE)
        else:
            self._again(transfer, end, attempt, now)
        if attempt is not None:
            book.fenced(end.engine_id, end.handle, attempt)
        if end.stop is not None:
            stop = end.stop
            self._tell(transfer, end, stop.outcome, stop)
            self._finish(transfer)
        self.unmap_if_idle(end.engine_id)

    def _again(self, transfer: Transfer, end: ProducerEnd, attempt: int | None, now: float) -> None:
        book = self._book
        book.move_producer(transfer, end, ProducerEvent.AGAIN)
        end.progress.reset(max(end.progress.attempt, attempt or 0) + 1)
        ttl = book.limits.lease
        end.lease = book.leases.grant(end.engine_id, transfer.transfer_id, (), writable=False, now=now, ttl=ttl)
        book.timers.set(Timer("lease", transfer.transfer_id), now + ttl)
        for consumer in transfer.consumers.values():
            if not consumer.terminal and consumer.stop is None:
                consumer.posted.clear()
                consumer.paired, consumer.match, consumer.missing = False, None, -1
                consumer.bytes_landed = consumer.bytes_overlapped = consumer.last_byte_ns = consumer.copy_ns = 0

    def consumer_fenced(self, transfer: Transfer, end: ConsumerEnd, now: float) -> None:
        """Goes on with a consumer in FENCING once nothing writes its blocks."""
        if end.state is not Consumer.FENCING or end.ops:
            return
        self._book.timers.clear(Timer("cfence", transfer.transfer_id, end.index))
        self._book.leases.release(end.lease)
        self._fence_over(end, now)
        self._book.move_consumer(transfer, end, ConsumerEvent.FENCED)
        assert end.stop is not None
        self._tell(transfer, end, end.stop.outcome, end.stop, self._so_far(transfer, end))
        self._after_consumer(transfer, now)
        self.unmap_if_idle(end.engine_id)

    def fence_overdue(self, transfer: Transfer, consumer: ConsumerEnd | None, now: float) -> None:
        """A fence ran past its deadline: tears the sessions down that keep it."""
        if consumer is None:
            assert transfer.producer is not None
            ops, fence = self._reading(transfer.producer), transfer.producer.fence
            timer = Timer("pfence", transfer.transfer_id)
        else:
            ops, fence = set(consumer.ops), consumer.fence
            timer = Timer("cfence", transfer.transfer_id, consumer.index)
        assert fence is not None
        self._book.fences.overdue(fence)
        self._book.out.append(TearDown(tuple(sorted(ops))))
        self._book.out.append(Note("fence_overdue", transfer.transfer_id, (("operations", len(ops)),)))
        self._book.timers.set(timer, now + self._book.limits.fence)

    def _fence_over(self, end: ProducerEnd | ConsumerEnd, now: float) -> None:
        assert end.fence is not None
        self._book.fences.over(end.fence, now)
        end.fence = None

    # -- success ----------------------------------------------------------------------------

    def land(self, transfer: Transfer, end: ConsumerEnd, now: float) -> None:
        """Every byte of this consumer is in place on every rank."""
        book = self._book
        book.move_consumer(transfer, end, ConsumerEvent.LAND)
        book.timers.clear(Timer("transfer", transfer.transfer_id, end.index))
        book.leases.release(end.lease)
        self._tell(transfer, end, Outcome.LANDED, None, self._facts(transfer, [end], int(now * 1e9)))
        self._after_consumer(transfer, now)
        self.unmap_if_idle(end.engine_id)

    def _after_consumer(self, transfer: Transfer, now: float) -> None:
        """Ends the producer when its last consumer has ended."""
        self.release_if_done(transfer, now)
        self._finish(transfer)

    def release_if_done(self, transfer: Transfer, now: float) -> None:
        """Frees the producer's blocks when every consumer is terminal."""
        end = transfer.producer
        if end is None or end.stop is not None or not transfer.all_came:
            return
        consumers = list(transfer.consumers.values())
        if not all(c.terminal for c in consumers):
            return
        wanted = transfer.wanted or 0  # a consumer too many was refused, which is not the producer's loss
        failed = next((c.peer_stop for c in consumers if c.peer_stop is not None and c.index < wanted), None)
        if failed is not None:
            self.stop_transfer(transfer, failed, failed, now)
        elif end.state is Producer.COMPLETE:
            book = self._book
            book.move_producer(transfer, end, ProducerEvent.RELEASE)
            book.leases.release(end.lease)
            self._tell(transfer, end, Outcome.RELEASED, None, self._facts(transfer, consumers, int(now * 1e9)))
            self._finish(transfer)
            self.unmap_if_idle(end.engine_id)

    # -- the end of all ---------------------------------------------------------------------

    def _finish(self, transfer: Transfer) -> None:
        if transfer.transfer_id not in self._book.transfers or not transfer.over:
            return
        if transfer.producer is None and transfer.stop is None:
            return  # its producer, or its deadline, will come
        self._book.entomb(transfer, Tomb(transfer.stop, transfer.producer is not None, set(transfer.consumers)))

    def unmap_if_idle(self, engine_id: str) -> None:
        """Lets an ended engine's memory go once no lease is on it."""
        entry = self._book.registry.get(engine_id)
        if entry is not None and entry.ended and not self._book.leases.held_by(engine_id):
            self._book.registry.forget(engine_id)
            self._book.touched.pop(engine_id, None)
            self._book.leases.forget_engine(engine_id)
            self._book.out.append(Unmap(engine_id))

    # -- helpers ----------------------------------------------------------------------------

    def _reading(self, end: ProducerEnd) -> set[int]:
        return {op_id for op_id, op in self._book.ops.items() if op.source is end.lease}

    def _cancel(self, ops: set[int]) -> None:
        self._book.out.extend(CancelOp(op_id) for op_id in sorted(ops))

    def _tell(
        self,
        transfer: Transfer,
        end: ProducerEnd | ConsumerEnd,
        outcome: Outcome,
        stop: Stop | None,
        facts: Facts | None = None,
    ) -> None:
        self._book.end_handle(
            end.engine_id,
            End(
                end.handle,
                transfer.transfer_id,
                outcome,
                stop.reason if stop else "",
                stop.detail if stop else "",
                facts or Facts(),
                isinstance(end, ProducerEnd),
                end.index if isinstance(end, ConsumerEnd) else 0,
            ),
        )

    def _so_far(self, transfer: Transfer, end: ConsumerEnd) -> Facts:
        """How far a consumer had come that was given up. The last byte has a time only where it was in place; no block
        counts, as none is known to be whole."""
        return Facts(
            kv_bytes=end.bytes_landed,
            copy_ns=end.copy_ns,
            transport=end.transport,
            lanes=end.lanes,
            first_post_ns=end.first_post_ns,
            overlapped_bytes=end.bytes_overlapped,
            offered_ns=transfer.producer.offered_ns if transfer.producer else 0,
            accepted_ns=end.accepted_ns,
            last_byte_ns=end.last_byte_ns if end.missing == 0 else 0,
        )

    def _facts(self, transfer: Transfer, ends: list[ConsumerEnd], now_ns: int) -> Facts:
        entry = self._book.registry.get(ends[0].engine_id)
        posts = [c.first_post_ns for c in ends if c.first_post_ns]
        return Facts(
            kv_bytes=sum(c.bytes_landed for c in ends),
            blocks=sum(len(c.block_ids) for c in ends),
            layers=len(entry.regions[0].layout.layers) if entry and 0 in entry.regions else 0,
            ranks=entry.ranks if entry else 0,
            copy_ns=sum(c.copy_ns for c in ends),
            transport=next((c.transport for c in ends if c.transport), ""),
            lanes=next((c.lanes for c in ends if c.lanes), ""),
            first_post_ns=min(posts, default=0),
            landed_ns=now_ns,
            overlapped_bytes=sum(c.bytes_overlapped for c in ends),
            offered_ns=transfer.producer.offered_ns if transfer.producer else 0,
            accepted_ns=max(c.accepted_ns for c in ends),
            last_byte_ns=max(c.last_byte_ns for c in ends),
        )
