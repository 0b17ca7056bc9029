"""Which copies can begin now: whatever is ready at a producer, wanted by a consumer and not posted
yet. Pure.

READ waits for the offer; WRITE follows the layers. Both come through here, so that an offer, an
accept, a layer and a late region are the same event: something became possible.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.kvd.book import Book
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.effects import Post, Stop
from pdserve.kvd.endings import Endings
from pdserve.kvd.ends import ConsumerEnd, Op, ProducerEnd, Transfer
from pdserve.kvd.registry import EngineEntry
from pdserve.kvd.reshard import Match, match
from pdserve.kvd.states import Consumer, ConsumerEvent, Producer
from pdserve.kvd.types import Mode, RegionKey
from pdserve.rpc.errors import ConsumerFailed, IncompatibleEngines, InvalidRequest

_FILLABLE = (Consumer.RESERVED, Consumer.FILLING)
_MATCHES_KEPT: Final = 1024
"""Of pairs of engines. Those of ended engines are among them: an engine's id never means another one."""


class Pairing:
    """See the module."""

    def __init__(self, book: Book, endings: Endings) -> None:
        self._book = book
        self._endings = endings
        self._matches: dict[tuple[str, str], Match] = {}

    def pump(
        self, transfer: Transfer, now: float, rank: int | None = None, layers: Iterable[int] | None = None
    ) -> None:
        """Posts what can be posted, on one rank and some layers or on all, and lands what is full."""
        producer = transfer.producer
        if producer is None or producer.state not in (Producer.COMPUTING, Producer.COMPLETE):
            return
        if transfer.mode is Mode.READ and producer.state is not Producer.COMPLETE:
            return
        source = self._book.registry.get(producer.engine_id)
        wanted = None if layers is None else tuple(layers)
        for consumer in list(transfer.consumers.values()):
            target = self._book.registry.get(consumer.engine_id)
            if consumer.state not in _FILLABLE or source is None or target is None:
                continue
            if not source.mapped or not target.mapped:
                continue  # a rank's memory is still to come; a deadline bounds the wait
            if not self._pair(transfer, producer, consumer, source, target, now):
                continue
            assert consumer.match is not None
            ranks = range(source.ranks) if rank is None else (rank,)
            every = range(consumer.match.layers)
            for r in ranks:
                self._post(transfer, producer, consumer, consumer.match, r, every if wanted is None else wanted, now)
            self.land_if_full(transfer, consumer, now)

    def land_if_full(self, transfer: Transfer, consumer: ConsumerEnd, now: float) -> None:
        """Ends a consumer whose last byte is in place, once the producer has offered."""
        producer = transfer.producer
        full = consumer.paired and consumer.missing == 0
        if full and producer is not None and producer.state is Producer.COMPLETE and consumer.state in _FILLABLE:
            self._endings.land(transfer, consumer, now)

    def match(self, source: EngineEntry, target: EngineEntry) -> Match:
        """How blocks go from one engine to another; the memory of both is here.

        Raises:
            IncompatibleEngines: they cannot; says what differs, and both layouts.
        """
        key = (source.engine_id, target.engine_id)
        known = self._matches.get(key)
        if known is None:
            if len(self._matches) >= _MATCHES_KEPT:
                self._matches.clear()
            known = self._matches[key] = match(source.layouts, target.layouts)
        return known

    def _pair(
        self,
        transfer: Transfer,
        producer: ProducerEnd,
        consumer: ConsumerEnd,
        source: EngineEntry,
        target: EngineEntry,
        now: float,
    ) -> bool:
        """Whether the two ends fit; ends the consumer where they do not."""
        try:
            pair = consumer.match or self.match(source, target)
        except IncompatibleEngines as error:
            self._refuse(transfer, consumer, IncompatibleEngines.reason, error.message, now)
            return False
        offered = len(producer.progress.block_ids) * pair.src_units
        if producer.state is Producer.COMPLETE:
            blocks = -(-offered // pair.dst_units)
            if consumer.end > blocks:
                detail = f"wants prompt blocks up to {consumer.end}, {blocks} are on offer"
                self._refuse(transfer, consumer, InvalidRequest.reason, detail, now)
                return False
        if not consumer.paired:
            for name, ids, entry in (
                ("destination", consumer.block_ids, target),
                ("source", producer.progress.block_ids, source),
            ):
                if ids and max(ids) >= entry.num_blocks:
                    detail = f"{name} block {max(ids)} of {entry.num_blocks}"
                    self._refuse(transfer, consumer, InvalidRequest.reason, detail, now)
                    return False
            consumer.paired, consumer.match = True, pair
            consumer.wanted = consumer.end * pair.dst_units
            consumer.missing = len(consumer.block_ids) * pair.dst_units * pair.layers * len(pair.shares)
        if producer.state is Producer.COMPLETE and consumer.wanted > offered:
            # Its last block holds more tokens than the source's blocks have: there is nothing to fill the rest with.
            consumer.missing -= (consumer.wanted - offered) * pair.layers * len(pair.shares)
            consumer.wanted = offered
        return True

    def _refuse(self, transfer: Transfer, consumer: ConsumerEnd, reason: str, detail: str, now: float) -> None:
        stop = Stop(Outcome.FAILED, reason, detail)
        peer = Stop(Outcome.FAILED, ConsumerFailed.reason, detail)
        self._endings.stop_consumer(transfer, consumer, stop, peer, now)

    def _post(
        self,
        transfer: Transfer,
        producer: ProducerEnd,
        consumer: ConsumerEnd,
        pair: Match,
        rank: int,
        layers: Iterable[int],
        now: float,
    ) -> None:
        """Posts what source rank `rank` has ready, for each rank that takes from it."""
        if not pair.takers[rank]:
            return
        progress = producer.progress
        together: dict[tuple[int, int], list[int]] = {}
        for layer in layers:
            done = consumer.posted.get((rank, layer), consumer.first_block * pair.dst_units)
            ready = min(progress.ready(rank, layer) * pair.src_units, consumer.wanted)
            if ready > done:
                together.setdefault((done, ready), []).append(layer)
                consumer.posted[rank, layer] = ready
        for (low, high), group in together.items():
            for taker in pair.takers[rank]:
                self._post_one(transfer, producer, consumer, pair, (rank, taker), tuple(group), low, high, now)

    def _post_one(
        self,
        transfer: Transfer,
        producer: ProducerEnd,
        consumer: ConsumerEnd,
        pair: Match,
        ranks: tuple[int, int],
        layers: tuple[int, ...],
        low: int,
        high: int,
        now: float,
    ) -> None:
        """Posts units `low` to `high` - 1."""
        book = self._book
        if consumer.state is Consumer.RESERVED:
            book.move_consumer(transfer, consumer, ConsumerEvent.POST)
            consumer.first_post_ns = int(now * 1e9)
        op_id = book.next_op
        book.next_op += 1
        lease = producer.lease
        book.ops[op_id] = Op(op_id, transfer, consumer, producer.progress.attempt, lease, len(layers), high - low)
        lease.in_flight += 1
        consumer.lease.in_flight += 1
        consumer.ops.add(op_id)
        book.out.append(
            Post(
                op_id,
                transfer.transfer_id,
                RegionKey(producer.engine_id, ranks[0]),
                RegionKey(consumer.engine_id, ranks[1]),
                layers,
                _blocks(producer.progress.block_ids, 0, low, high, pair.src_units),
                _blocks(consumer.block_ids, consumer.first_block, low, high, pair.dst_units),
                low,
            )
        )


def _blocks(ids: Sequence[int], first: int, low: int, high: int, units: int) -> tuple[int, ...]:
    """The block that each of the units `low` to `high` - 1 lies in, of blocks that begin with prompt block `first`."""
    if units == 1:
        return tuple(ids[low - first : high - first])
    return tuple(ids[unit // units - first] for unit in range(low, high))
