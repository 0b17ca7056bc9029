"""The table of transfers: what each message, operation and loss does. Pure.

Every method takes the time and leaves what is to be done in `take()`. Offers, accepts and notices
come in any order; what cannot be matched yet is parked, bounded in number and time.
"""

from collections.abc import Iterable

from pdserve.kvd.book import Book, Timer, orphan_timer
from pdserve.kvd.client.messages import Accept, Begin, Offer, Outcome, Retract
from pdserve.kvd.consuming import Consuming, Source
from pdserve.kvd.deadlines import Deadlines
from pdserve.kvd.effects import Effect, Stop, Unmap
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd, Tomb
from pdserve.kvd.intake import Intake, failed
from pdserve.kvd.leases import Leases
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Notice
from pdserve.kvd.pairing import Pairing
from pdserve.kvd.peers.relay import Relay
from pdserve.kvd.producing import Producing
from pdserve.kvd.registry import Registry
from pdserve.kvd.states import Consumer, Producer
from pdserve.kvd.steps import Steps
from pdserve.kvd.types import TRANSFER_ID_BYTES, Mode
from pdserve.rpc import errors

__all__ = ["Source", "Transfers"]


class Transfers:
    """See the module. `book` is for reading."""

    def __init__(self, registry: Registry, leases: Leases, limits: Limits) -> None:
        self.book = Book(registry, leases, limits)
        self._intake = Intake(self.book)
        self._endings = Endings(self.book)
        self._pairing = Pairing(self.book, self._endings)
        self._steps = Steps(self.book, self._pairing, self._endings)
        self._deadlines = Deadlines(self.book, self._endings)
        self._producing = Producing(self.book, self._intake, self._endings, self._pairing, self._steps, self._deadlines)
        self._consuming = Consuming(self.book, self._intake, self._endings, self._pairing, self._deadlines)
        self.relay = Relay(self.book, self._intake, self._endings)
        """Ends of this node's consumers whose transfers' book another node's daemon keeps."""

    @property
    def draining(self) -> bool:
        """Whether new transfers are refused."""
        return self._intake.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._intake.draining = value

    @property
    def open(self) -> int:
        """Transfers that are open here, those of which only a consumer's end is here included."""
        return len(self.book.transfers) + len(self.relay)

    def take(self) -> list[Effect]:
        """What is to be done since the last call, in order."""
        out, self.book.out = self.book.out, []
        return out

    # -- coming in --------------------------------------------------------------------------

    def begin(self, engine_id: str, message: Begin, now: float) -> None:
        """A producer starts to compute.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        self._producing.begin(engine_id, message, now)

    def offer(self, engine_id: str, message: Offer, now: float) -> None:
        """A producer holds a computed prompt's blocks; with or without a begin before.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        self._producing.offer(engine_id, message, now)

    def accept(self, engine_id: str, message: Accept, source: Source, now: float) -> None:
        """A consumer has reserved blocks.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        self._consuming.accept(engine_id, message, source, now)

    def refuse(self, engine_id: str, message: Accept, error: errors.PdserveError) -> None:
        """An accept whose ticket or locator was not honoured; the transfer itself is left alone.

        Raises:
            InvalidRequest: the handle is another one's.
        """
        self._consuming.refuse(engine_id, message, error)

    # -- taking back ------------------------------------------------------------------------

    def retract(self, engine_id: str, message: Retract, now: float) -> None:
        """A producer takes its blocks back; of a consumer's handle, final: it gives itself up.

        Raises:
            InvalidRequest: not final, of a consumer's handle.
        """
        key = (engine_id, message.handle)
        found = self.book.handles.get(key)
        reason = message.reason or errors.RequestCancelled.reason
        if found is None:
            if not message.final:
                self.book.fenced(engine_id, message.handle, message.attempt)
            elif key not in self.book.ended_handles:
                stop = Stop(Outcome.CANCELLED, reason, "nothing was begun under this handle")
                self._intake.end_at_once(engine_id, message.handle, b"", stop, producer=True)
            return
        transfer, end = found
        if message.final:
            mine = Stop(Outcome.CANCELLED, reason)
            if isinstance(end, ProducerEnd):
                theirs = failed(errors.ProducerFailed, f"prefill gave the request up: {reason}")
                self._endings.stop_transfer(transfer, mine, theirs, now)
            else:
                theirs = failed(errors.ConsumerFailed, f"decode gave the request up: {reason}")
                self._endings.stop_consumer(transfer, end, mine, theirs, now)
        elif isinstance(end, ConsumerEnd):
            raise errors.InvalidRequest(f"handle {message.handle} is a consumer's: nothing to preempt")
        elif message.attempt < end.progress.attempt:
            self.book.fenced(engine_id, message.handle, message.attempt)
        else:
            self._endings.preempt(transfer, end, message.attempt, now)

    def cancel(self, transfer_id: bytes, reason: str, now: float) -> None:
        """Gives a transfer up; an unknown one is remembered.

        Raises:
            InvalidRequest: not a transfer id.
        """
        if len(transfer_id) != TRANSFER_ID_BYTES:
            raise errors.InvalidRequest(f"a transfer_id of {len(transfer_id)} bytes")
        stop = Stop(Outcome.CANCELLED, reason or errors.RequestCancelled.reason)
        transfer = self.book.transfers.get(transfer_id)
        if transfer is not None:
            self._endings.stop_transfer(transfer, stop, stop, now)
        elif transfer_id not in self.book.tombs:
            self.book.remember(transfer_id, Tomb(stop, False, set()))

    def renew(self, engine_id: str, transfer_ids: Iterable[bytes], now: float) -> None:
        """An engine's service still has these requests, so its half is worth waiting for: the producer's
        renews its lease and the wait for its first word, a consumer's the wait for its accept, which may
        stand in its engine's queue. Unknown and ended ones are passed over."""
        book, limits = self.book, self.book.limits
        for tid in transfer_ids:
            transfer = book.transfers.get(tid)
            if transfer is None:
                continue
            if engine_id != transfer.source_engine:
                book.timers.put_off(Timer("accept", tid), now + limits.accept)
                continue
            book.timers.put_off(Timer("park", tid), now + limits.park)
            if book.timers.put_off(Timer("lease", tid), now + limits.lease) and transfer.producer is not None:
                book.leases.renew(transfer.producer.lease, now, limits.lease)

    def stood_still(self, seconds: float) -> None:
        """The daemon did not run for so long: no deadline is nearer for that, since whoever renews has waited, too."""
        self.book.timers.postpone(seconds)
        self.relay.put_off(seconds)
        for engine_id in self.book.touched:
            self.book.touched[engine_id] += seconds
        for transfer in self.book.transfers.values():
            if transfer.producer is not None and transfer.producer.lease.expires_at is not None:
                transfer.producer.lease.expires_at += seconds

    def mode_of(self, op_id: int) -> Mode:
        """Of the transfer of an operation that is in flight."""
        return self.relay.mode(op_id) if self.relay.owns(op_id) else self.book.ops[op_id].transfer.mode

    # -- from below -------------------------------------------------------------------------

    def notice(self, notice: Notice, now: float) -> bool:
        """One notice of an engine's step; False where it speaks of nobody here."""
        return self._steps.hear(notice, now)

    def op_ended(
        self,
        op_id: int,
        now: float,
        *,
        moved: int = 0,
        ns: int = 0,
        transport: str = "",
        lanes: str = "",
        error: str = "",
    ) -> None:
        """An operation is terminal: nothing of it is in flight. `error` empty: all bytes are there."""
        op = self.book.ops.pop(op_id)
        transfer, consumer = op.transfer, op.consumer
        producer = transfer.producer
        assert producer is not None
        op.source.in_flight -= 1
        consumer.lease.in_flight -= 1
        consumer.ops.discard(op_id)
        consumer.copy_ns += ns
        if transport:
            consumer.transport, consumer.lanes = transport, lanes or consumer.lanes
        self.book.touched[producer.engine_id] = now
        if consumer.state is Consumer.FILLING and producer.lease is op.source and not op.source.quarantined:
            if error:
                stop = failed(errors.TransferFailed, error)
                self._endings.stop_consumer(transfer, consumer, stop, stop, now)
            else:
                consumer.missing -= op.layers * op.units
                consumer.bytes_landed += moved
                consumer.last_byte_ns = int(now * 1e9)
                if producer.state is Producer.COMPUTING:
                    consumer.bytes_overlapped += moved
                self._pairing.land_if_full(transfer, consumer, now)
        self._endings.consumer_fenced(transfer, consumer, now)
        self._endings.producer_fenced(transfer, now)

    def regions_changed(self, engine_id: str, now: float) -> None:
        """A rank's memory has come: what waited for it can begin."""
        for transfer in list(self.book.by_engine.get(engine_id, {}).values()):
            self._pairing.pump(transfer, now)

    def engine_lost(self, engine_id: str, detail: str, now: float) -> None:
        """Ends everything of an engine that cannot be heard any more; it may come back."""
        own = failed(errors.PeerLost, detail)
        self._lose(engine_id, own, detail, now)

    def engine_ended(self, engine_id: str, detail: str, now: float) -> None:
        """An engine is dead: ends everything of it, and its memory is unmapped once idle."""
        if not self.book.registry.end(engine_id):
            return
        self._lose(engine_id, failed(errors.EngineDied, detail), detail, now)
        self.relay.engine_ended(engine_id, detail, now)
        for key in [k for k in self.book.steps if k[0] == engine_id]:
            del self.book.steps[key]
        for orphan in [k for k in self.book.orphans if k[0] == engine_id]:
            del self.book.orphans[orphan]
            self.book.timers.clear(orphan_timer(orphan))
        self.book.touched.pop(engine_id, None)
        self.book.timers.clear(Timer("tie", engine_id=engine_id))
        self._endings.unmap_if_idle(engine_id)

    def guest_lost(self, engine_id: str, detail: str, now: float) -> None:
        """An engine of a node that cannot be reached: ends everything of it, and forgets it; it may come back.

        Its operations end here, since nobody will answer them. Reads of blocks that are free now do no harm: what they
        fetch is never taken, since LANDED would have to come from here.
        """
        self._lose(engine_id, failed(errors.PeerLost, detail), detail, now)
        for op_id in [op_id for op_id, op in self.book.ops.items() if op.consumer.engine_id == engine_id]:
            self.op_ended(op_id, now, error=detail)
        self.book.leases.forget_engine(engine_id)
        self.book.registry.drop(engine_id)
        self.book.out.append(Unmap(engine_id))

    def _lose(self, engine_id: str, own: Stop, detail: str, now: float) -> None:
        peers = failed(errors.PeerLost, f"engine {engine_id}: {detail}")
        for transfer in list(self.book.by_engine.get(engine_id, {}).values()):
            for consumer in list(transfer.consumers.values()):
                if consumer.engine_id == engine_id:
                    self._endings.stop_consumer(transfer, consumer, own, peers, now)
            if transfer.source_engine == engine_id:
                self._endings.stop_transfer(transfer, own, peers, now)

    def expire(self, now: float) -> None:
        """Does everything that is due."""
        self._deadlines.expire(now)
        self.relay.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        times = [when for when in (self.book.timers.next(), self.relay.next_deadline()) if when is not None]
        return min(times, default=None)

    def check(self) -> None:
        """Raises IntegrityError where the books do not add up; for idle moments and tests."""
        for entry in (*self.book.registry, *self.book.registry.guests()):
            if entry.regions:
                self.book.leases.check(entry.engine_id, entry.num_blocks)
        self.relay.check()
