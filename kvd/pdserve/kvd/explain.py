"""What operators are told of an open transfer: what it waits for, in words, why it stops, what it wants. Pure.

The words are made here once and travel in the answer, so that every client shows the same.
"""

from collections.abc import Callable, Sequence

from pdserve.kvd.book import Timer
from pdserve.kvd.effects import Stop
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd, Transfer
from pdserve.kvd.registry import Registry
from pdserve.kvd.states import Consumer, Producer
from pdserve.kvd.types import Mode

Due = Callable[[Timer], float | None]
"""When a deadline is; None where it is not set."""


def waits_for(transfer: Transfer, due: Due, now: float) -> str:
    """What a transfer waits for, and for how long yet where a deadline runs."""
    producer, consumers = transfer.producer, [c for _, c in sorted(transfer.consumers.items())]
    clauses = []
    if producer is not None and producer.state is Producer.FENCING:
        clauses.append(_producer_fence(transfer, producer, consumers, due, now))
    else:
        several = len(consumers) > 1 or (transfer.wanted or 1) > 1
        for consumer in consumers:
            words = _consumer(transfer, consumer, due, now)
            if words:
                clauses.append(f"consumer {consumer.index}: {words}" if several else words)
        clauses.append(_producer(transfer, consumers, due, now))
    return "; ".join(clause for clause in clauses if clause) or "nothing"


def stopped(transfer: Transfer) -> Stop | None:
    """Why a transfer, or the first of its ends that is given up, is being stopped; None where nothing is."""
    ends = [transfer.producer, *(c for _, c in sorted(transfer.consumers.items()))]
    return transfer.stop or next((end.stop for end in ends if end is not None and end.stop is not None), None)


def bytes_wanted(transfer: Transfer, registry: Registry) -> int:
    """What its consumers want in all, over all ranks; a consumer whose memory is not here counts nothing."""
    total = 0
    for consumer in transfer.consumers.values():
        entry = registry.get(consumer.engine_id)
        if entry is None or not entry.mapped:
            continue
        per_block = sum(region.layout.block_bytes for region in entry.regions.values())
        if consumer.match is None:
            total += len(consumer.block_ids) * per_block
        else:  # the last block may hold more than the source has
            units = consumer.wanted - consumer.first_block * consumer.match.dst_units
            total += units * per_block // consumer.match.dst_units
    return total


def _producer(transfer: Transfer, consumers: Sequence[ConsumerEnd], due: Due, now: float) -> str:
    """What is owed to or by a producer that is not fencing."""
    tid, end = transfer.transfer_id, transfer.producer
    if end is None:
        return "parked: the producer is not known yet" + _left(due(Timer("park", tid)), now)
    if end.state is Producer.COMPUTING:
        lease = _left(due(Timer("lease", tid)), now, "its lease has ")
        if transfer.mode is Mode.READ:
            return f"waits for prefill's offer{lease}"
        if not transfer.all_came:
            return f"waits for prefill's offer and {_accepts(transfer, consumers)}{lease}"
        full = all(c.terminal or (c.paired and c.missing == 0) for c in consumers)
        return f"waits for prefill's {'offer' if full else 'next layers'}{lease}"
    if end.state is Producer.COMPLETE and not transfer.all_came:
        return f"waits for {_accepts(transfer, consumers)}{_left(due(Timer('accept', tid)), now)}"
    return ""


def _accepts(transfer: Transfer, consumers: Sequence[ConsumerEnd]) -> str:
    wanted = transfer.wanted or 1
    if wanted == 1:
        return "decode's accept"
    return f"{wanted - sum(c.index < wanted for c in consumers)} of {wanted} accepts"


def _consumer(transfer: Transfer, end: ConsumerEnd, due: Due, now: float) -> str:
    """What holds up one consumer, beyond its producer's being late; empty where nothing does."""
    if end.state is Consumer.FENCING:
        deadline = due(Timer("cfence", transfer.transfer_id, end.index))
        return _fence([end], len(end.ops), deadline, now)
    left = _left(due(Timer("transfer", transfer.transfer_id, end.index)), now)
    if end.ops and end.state is Consumer.FILLING:
        return f"copying, {_operations(len(end.ops))}{left}"
    offered = transfer.producer is not None and transfer.producer.state is Producer.COMPLETE
    if offered and end.state in (Consumer.RESERVED, Consumer.FILLING):
        return f"waits for the memory of a rank{left}"
    return ""


def _producer_fence(
    transfer: Transfer, end: ProducerEnd, consumers: Sequence[ConsumerEnd], due: Due, now: float
) -> str:
    """The fence of a producer, which covers what its consumers have in flight."""
    fencing: list[ProducerEnd | ConsumerEnd] = [end, *(c for c in consumers if c.state is Consumer.FENCING)]
    words = _fence(fencing, end.lease.in_flight, due(Timer("pfence", transfer.transfer_id)), now)
    return f"preempted, {words}" if end.stop is None else words


def _fence(ends: Sequence[ProducerEnd | ConsumerEnd], operations: int, deadline: float | None, now: float) -> str:
    fences = [end.fence for end in ends if end.fence is not None]
    since = max((now - fence.since for fence in fences), default=0.0)
    words = f"fencing since {since:.1f} s: {_operations(operations)} in flight"
    if any(fence.overdue for fence in fences):
        return f"{words}, the session is being closed"
    return words + _left(deadline, now, "the session is closed in ", "")


def _operations(count: int) -> str:
    return f"{count} operation{'' if count == 1 else 's'}"


def _left(deadline: float | None, now: float, before: str = "", after: str = " left") -> str:
    return "" if deadline is None else f", {before}{max(0.0, deadline - now):.1f} s{after}"
