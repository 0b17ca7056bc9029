"""A producer begins and offers. Pure."""

from pdserve.kvd.book import Book, Timer, orphan_timer
from pdserve.kvd.client.messages import Begin, Offer
from pdserve.kvd.deadlines import Deadlines
from pdserve.kvd.effects import Stop
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ProducerEnd, Transfer
from pdserve.kvd.intake import MAX_CONSUMERS, Intake, failed
from pdserve.kvd.pairing import Pairing
from pdserve.kvd.progress import Progress
from pdserve.kvd.states import Producer, ProducerEvent
from pdserve.kvd.steps import Steps
from pdserve.kvd.types import TRANSFER_ID_BYTES
from pdserve.rpc import errors


class Producing:
    """See the module."""

    def __init__(
        self, book: Book, intake: Intake, endings: Endings, pairing: Pairing, steps: Steps, deadlines: Deadlines
    ) -> None:
        self._book = book
        self._intake = intake
        self._endings = endings
        self._pairing = pairing
        self._steps = steps
        self._deadlines = deadlines

    def begin(self, engine_id: str, message: Begin, now: float) -> None:
        """A producer starts to compute.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        if self._intake.known(engine_id, message.handle, message.transfer_id, ProducerEnd) is None:
            found = self._producer(engine_id, message, now)
            if found is not None:
                transfer, end = found
                self._book.move_producer(transfer, end, ProducerEvent.BEGIN)
                self._producer_came(transfer, end, now)

    def offer(self, engine_id: str, message: Offer, now: float) -> None:
        """A producer holds a computed prompt's blocks; with or without a begin before.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        known = self._intake.known(engine_id, message.handle, message.transfer_id, ProducerEnd)
        if known == "over":
            return
        if known is None:
            found = self._producer(engine_id, message, now)
            if found is None:
                return
            transfer, end = found
            self._book.move_producer(transfer, end, ProducerEvent.BEGIN)
            end.progress.reset(message.attempt)
            self._producer_came(transfer, end, now)
            if end.stop is not None:
                return
        else:
            transfer, end = self._book.transfers[message.transfer_id], self._producer_of(message.transfer_id)
        self._offered(transfer, end, message, now)

    def _producer(self, engine_id: str, message: Begin | Offer, now: float) -> tuple[Transfer, ProducerEnd] | None:
        """A new producer's end, not yet moved; None where its handle was ended at once."""
        book, tid = self._book, message.transfer_id
        transfer = book.transfers.get(tid)
        tomb = book.tombs.get(tid)
        stop: Stop | None = None
        if len(tid) != TRANSFER_ID_BYTES:
            stop = failed(errors.InvalidRequest, f"a transfer_id of {len(tid)} bytes")
        elif not self._intake.lives(engine_id):
            stop = failed(errors.StaleEpoch, f"engine {engine_id} has ended")
        elif not 1 <= message.consumers <= MAX_CONSUMERS:
            stop = failed(errors.InvalidRequest, f"{message.consumers} consumers")
        elif tomb is not None:
            used = failed(errors.TransferUsed, "the transfer is over")
            stop = used if tomb.produced else tomb.stop or used
            tomb.produced = True
        elif transfer is None:
            stop = self._intake.no_room()
        elif transfer.producer is not None:
            stop = failed(errors.TransferUsed, "the transfer has a producer")
        elif transfer.stop is not None:
            stop = transfer.stop
        elif transfer.source_engine != engine_id:
            stop = failed(errors.TicketRefused, f"the consumer expects engine {transfer.source_engine}")
        elif transfer.mode is not message.mode:
            stop = failed(errors.InvalidRequest, f"the consumer accepted {transfer.mode.value}")
            self._endings.stop_transfer(transfer, stop, stop, now)
        if stop is not None:
            self._intake.end_at_once(engine_id, message.handle, tid, stop, producer=True, consumer=0)
            return None
        if transfer is None:
            transfer = Transfer(tid, message.mode, engine_id, now)
            book.add(transfer)
        key = (engine_id, message.handle)
        book.timers.clear(orphan_timer(key))
        progress = book.orphans.pop(key, None) or Progress()
        lease = book.leases.grant(engine_id, tid, (), writable=False, now=now, ttl=book.limits.lease)
        end = ProducerEnd(engine_id, message.handle, progress, lease)
        transfer.producer, transfer.wanted = end, message.consumers
        book.parked -= 1
        book.handles[key] = (transfer, end)
        return transfer, end

    def _producer_came(self, transfer: Transfer, end: ProducerEnd, now: float) -> None:
        book = self._book
        book.touched[end.engine_id] = now
        book.timers.clear(Timer("park", transfer.transfer_id))
        book.timers.set(Timer("lease", transfer.transfer_id), now + book.limits.lease)
        assert transfer.wanted is not None
        self._steps.adopt(transfer, end, now)
        for consumer in list(transfer.consumers.values()):
            if consumer.index >= transfer.wanted:
                stop = failed(errors.InvalidRequest, f"consumer {consumer.index} of {transfer.wanted}")
                self._endings.stop_consumer(transfer, consumer, stop, stop, now)
        self._endings.release_if_done(transfer, now)  # all its consumers may have failed before
        if end.stop is None:
            self._pairing.pump(transfer, now)
            self._deadlines.watch(transfer, now)

    def _offered(self, transfer: Transfer, end: ProducerEnd, message: Offer, now: float) -> None:
        book = self._book
        if end.stop is not None or (end.state is Producer.COMPLETE and message.attempt == end.progress.attempt):
            return  # its end is on the way, or said twice
        problem = self._problem_of_offer(transfer, end, message)
        if problem:
            stop = failed(errors.InvalidRequest, problem)
            self._endings.stop_transfer(transfer, stop, stop, now)
            return
        new = message.block_ids[len(end.progress.block_ids) :]
        end.progress.finish(message.block_ids)
        book.leases.extend(end.lease, new)
        book.move_producer(transfer, end, ProducerEvent.OFFER)
        end.offered_ns = message.stamped_ns
        book.touched[end.engine_id] = now
        if not transfer.all_came:
            book.timers.set(Timer("accept", transfer.transfer_id), now + book.limits.accept)
        for consumer in transfer.consumers.values():
            if not consumer.terminal and consumer.stop is None:
                book.timers.set(Timer("transfer", transfer.transfer_id, consumer.index), now + book.limits.transfer)
        self._pairing.pump(transfer, now)
        self._endings.release_if_done(transfer, now)
        self._deadlines.watch(transfer, now)

    def _problem_of_offer(self, transfer: Transfer, end: ProducerEnd, message: Offer) -> str:
        ids, known = message.block_ids, end.progress.block_ids
        entry = self._book.registry.get(end.engine_id)
        if end.state is not Producer.COMPUTING:
            return f"an offer in {end.state.value}: an attempt ends with `fenced` before the next one offers"
        if message.attempt != end.progress.attempt:
            return f"an offer of attempt {message.attempt}, the present one is {end.progress.attempt}"
        if (message.mode, message.consumers) != (transfer.mode, transfer.wanted):
            return "the offer's mode or consumers are not those of the begin"
        if not ids or not message.tokens:
            return "an offer without blocks or tokens"
        if len(set(ids)) != len(ids):
            return "the offer names a block twice"
        if known != list(ids[: len(known)]):
            return "the offer names other blocks than the chunks before it"
        if entry is not None and entry.mapped:
            if max(ids) >= entry.num_blocks:
                return f"block {max(ids)} of {entry.num_blocks}"
            if message.tokens > len(ids) * entry.regions[0].layout.block_size:
                return f"{message.tokens} tokens in {len(ids)} blocks"
        return self._book.leases.conflict(end.engine_id, ids[len(known) :], writable=False)

    def _producer_of(self, transfer_id: bytes) -> ProducerEnd:
        end = self._book.transfers[transfer_id].producer
        assert end is not None
        return end
