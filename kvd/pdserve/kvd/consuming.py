"""A consumer accepts. Pure."""

from dataclasses import dataclass

from pdserve.kvd.book import Book, Timer
from pdserve.kvd.client.messages import Accept, Outcome
from pdserve.kvd.deadlines import Deadlines
from pdserve.kvd.effects import Stop
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ConsumerEnd, Tomb, Transfer
from pdserve.kvd.intake import MAX_CONSUMERS, Intake, failed
from pdserve.kvd.pairing import Pairing
from pdserve.kvd.registry import EngineEntry
from pdserve.kvd.reshard import described
from pdserve.kvd.states import ConsumerEvent, Producer
from pdserve.kvd.types import TRANSFER_ID_BYTES, Identity, Mode, identity_difference
from pdserve.rpc import errors


@dataclass(frozen=True, slots=True)
class Source:
    """What an accept's ticket or locator, whose signature was checked, says of its producer."""

    engine_id: str
    mode: Mode
    identity: Identity
    kvd_address: str = ""
    """Where its daemon is: HOST:PORT for other nodes, else a socket of its own."""


class Consuming:
    """See the module."""

    def __init__(self, book: Book, intake: Intake, endings: Endings, pairing: Pairing, deadlines: Deadlines) -> None:
        self._book = book
        self._intake = intake
        self._endings = endings
        self._pairing = pairing
        self._deadlines = deadlines

    def accept(self, engine_id: str, message: Accept, source: Source, now: float) -> None:
        """A consumer has reserved blocks.

        Raises:
            InvalidRequest: the handle is another one's; nothing was changed.
        """
        if self._intake.known(engine_id, message.handle, message.transfer_id, ConsumerEnd) is not None:
            return
        book, tid = self._book, message.transfer_id
        transfer, tomb = book.transfers.get(tid), book.tombs.get(tid)
        stop = self._no_consumer(engine_id, transfer, tomb, message, source)
        if stop is not None:
            self._intake.end_at_once(engine_id, message.handle, tid, stop, producer=False, consumer=message.consumer)
            return
        if transfer is None:
            transfer = Transfer(tid, source.mode, source.engine_id, now)
            book.add(transfer)
            book.timers.set(Timer("park", tid), now + book.limits.park)
        problem = self._misfit(engine_id, message, source)
        blocks = () if problem else message.block_ids
        lease = book.leases.grant(engine_id, tid, blocks, writable=True, now=now, ttl=None)
        end = ConsumerEnd(
            message.consumer, engine_id, message.handle, message.first_block, blocks, lease, message.stamped_ns
        )
        transfer.consumers[message.consumer] = end
        book.link(engine_id, transfer)
        book.handles[engine_id, message.handle] = (transfer, end)
        book.move_consumer(transfer, end, ConsumerEvent.ACCEPT)
        if transfer.producer is not None and transfer.producer.state is Producer.COMPLETE:
            book.touched[source.engine_id] = now  # an accept of what is not on offer lets nothing move
        if transfer.all_came:
            book.timers.clear(Timer("accept", tid))
        if problem:
            peer = Stop(Outcome.FAILED, errors.ConsumerFailed.reason, problem.detail)
            self._endings.stop_consumer(transfer, end, problem, peer, now)
            return
        if not message.block_ids:
            self._endings.land(transfer, end, now)
            return
        if transfer.producer is not None and transfer.producer.state is Producer.COMPLETE:
            book.timers.set(Timer("transfer", tid, end.index), now + book.limits.transfer)
        self._pairing.pump(transfer, now)
        self._deadlines.watch(transfer, now)

    def refuse(self, engine_id: str, message: Accept, error: errors.PdserveError) -> None:
        """An accept whose ticket or locator was not honoured; the transfer itself is left alone.

        Raises:
            InvalidRequest: the handle is another one's.
        """
        if self._intake.known(engine_id, message.handle, message.transfer_id, ConsumerEnd) is None:
            stop = Stop(Outcome.FAILED, error.reason, error.message)
            self._intake.end_at_once(
                engine_id, message.handle, message.transfer_id, stop, producer=False, consumer=message.consumer
            )

    def _no_consumer(
        self, engine_id: str, transfer: Transfer | None, tomb: Tomb | None, message: Accept, source: Source
    ) -> Stop | None:
        """Why there is no place for this consumer; None when there is."""
        used = failed(errors.TransferUsed, f"consumer {message.consumer} of the transfer has been taken")
        if len(message.transfer_id) != TRANSFER_ID_BYTES:
            return failed(errors.InvalidRequest, f"a transfer_id of {len(message.transfer_id)} bytes")
        if tomb is not None:
            stop = used if message.consumer in tomb.consumed else tomb.stop or used
            tomb.consumed.add(message.consumer)
            return stop
        if not 0 <= message.consumer < MAX_CONSUMERS:
            return failed(errors.InvalidRequest, f"consumer {message.consumer}")
        try:
            self._book.registry.live(engine_id)
            self._book.registry.live(source.engine_id)
        except errors.StaleEpoch as error:
            return Stop(Outcome.FAILED, error.reason, error.message)
        if transfer is None:
            return self._intake.no_room()
        if message.consumer in transfer.consumers:
            return used
        if transfer.stop is not None:
            return transfer.stop
        if transfer.source_engine != source.engine_id:
            return failed(errors.TicketRefused, f"engine {source.engine_id} does not produce this transfer")
        if transfer.mode is not source.mode:
            return failed(errors.InvalidRequest, f"the producer's mode is {transfer.mode.value}")
        if transfer.wanted is not None and message.consumer >= transfer.wanted:
            return failed(errors.InvalidRequest, f"consumer {message.consumer} of {transfer.wanted}")
        return None

    def _misfit(self, engine_id: str, message: Accept, source: Source) -> Stop | None:
        """Why this engine cannot take these blocks from that one; None when it can."""
        ours = self._book.registry.live(engine_id)
        theirs = self._book.registry.live(source.engine_id)
        difference = identity_difference(theirs.identity or source.identity, ours.identity or {})
        both = ours.mapped and theirs.mapped  # else pairing compares them, when the last rank's memory has come
        if difference:
            told = ", ".join(f"{name}: {what}" for name, what in difference.items())
            layouts = _layouts(theirs, ours) if both else ""
            return failed(errors.IncompatibleEngines, f"the engines differ: {told}{layouts}")
        try:
            if both:
                self._pairing.match(theirs, ours)
        except errors.IncompatibleEngines as error:
            return failed(errors.IncompatibleEngines, error.message)
        problem = self._book.leases.conflict(engine_id, message.block_ids, writable=True)
        if not problem and ours.mapped and message.block_ids and max(message.block_ids) >= ours.num_blocks:
            problem = f"block {max(message.block_ids)} of {ours.num_blocks}"
        return failed(errors.InvalidRequest, problem) if problem else None


def _layouts(source: EngineEntry, target: EngineEntry) -> str:
    told = (f"{name}: {described(e.layouts[0], e.ranks)}" for name, e in (("source", source), ("destination", target)))
    return f"; {'; '.join(told)}"
