"""What the daemon shows to Prometheus: read from its books when that asks."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from pdserve.kvd.client.messages import Participant
from pdserve.kvd.node import Node
from pdserve.kvd.peers.link import LinkState
from pdserve.kvd.states import Consumer, Producer
from pdserve.kvd.types import Mode
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.tally import Reading

_DEADLINES: Final = ("lease", "accept", "transfer", "park")
_OPEN: Final = (
    *(("producer", state) for state in Producer if state not in (Producer.NONE, Producer.FREED)),
    *(("consumer", state) for state in (Consumer.RESERVED, Consumer.FILLING, Consumer.FENCING)),
)


def metrics_of(node: Node) -> Metrics:
    """The metrics of one daemon."""
    metrics = Metrics(names.KVD, c.KVD, node.counts.tally)
    for reader in (_engines, _transfers, _fences, _rest, _peers):
        metrics.read(partial(reader, node))
    return metrics


def _engines(node: Node) -> Iterator[Reading]:
    states, kinds = Counter[str](), Counter[tuple[str, str]]()
    for member in node.attachments.everybody():
        kinds[member.kind.value, "attached" if member.connected else "away"] += 1
    for entry in node.registry:
        present = any(member.connected for member in node.attachments.of(entry.engine_id))
        states["ended" if entry.ended else "attached" if present else "away"] += 1
        for rank, region in entry.regions.items():
            who = (entry.engine_id, str(rank))
            blocks = node.leases.counts(entry.engine_id, region.layout.num_blocks)
            yield c.KVD_REGION_BYTES, (*who, region.kind.value), region.size
            yield c.KVD_BLOCKS, (*who, "free"), blocks.free
            yield c.KVD_BLOCKS, (*who, "leased"), blocks.leased
            yield c.KVD_BLOCKS, (*who, "in_flight"), blocks.in_flight
            yield c.KVD_BLOCKS, (*who, "quarantined"), blocks.quarantined
    for state in ("attached", "away", "ended"):
        yield c.KVD_ENGINES, (state,), states[state]
    for kind in Participant:
        for state in ("attached", "away"):
            yield c.KVD_PARTICIPANTS, (kind.value, state), kinds[kind.value, state]


def _transfers(node: Node) -> Iterator[Reading]:
    book = node.transfers.book
    modes, ends = Counter[Mode](), Counter[tuple[str, Producer | Consumer]]()
    for transfer in book.transfers.values():
        modes[transfer.mode] += 1
        if transfer.producer is not None:
            ends["producer", transfer.producer.state] += 1
        for consumer in transfer.consumers.values():
            ends["consumer", consumer.state] += 1
    for mode in Mode:
        yield c.KVD_TRANSFERS, (mode.value,), modes[mode]
    for end, state in _OPEN:
        yield c.KVD_ENDS, (end, state.value), ends[end, state]
    yield c.KVD_COPIES_RUNNING, (), len(book.ops)
    for deadline in _DEADLINES:
        yield c.KVD_EXPIRIES, (deadline,), book.expired.get(deadline, 0)


def _fences(node: Node) -> Iterator[Reading]:
    fences = node.transfers.book.fences
    yield c.KVD_FENCES, (), fences.count
    yield c.KVD_FENCES_WAITED, (), fences.waited
    yield c.KVD_FENCE_SECONDS, (), fences.total
    yield c.KVD_FENCE_LONGEST, (), fences.longest
    yield c.KVD_FENCES_TORN_DOWN, (), fences.torn_down


def _rest(node: Node) -> Iterator[Reading]:
    yield c.KVD_NOTICES, ("malformed",), node.notices.malformed
    yield c.KVD_DEFECTS, (), node.defects
    yield c.KVD_COPIER, (node.mover.name,), 1
    yield c.KVD_DRAINING, (), node.transfers.draining


def _peers(node: Node) -> Iterator[Reading]:
    states = Counter(link.state for link in node.desk.links)
    for state in LinkState:
        yield c.KVD_PEERS, (state.value,), states[state]
    yield c.KVD_PEERS_LOST, (), node.desk.lost
    yield c.KVD_PEER_OPERATIONS, (), sum(node.desk.guests.carried_by(link) for link in node.desk.links)
