"""How much of an engine's pool fences may keep: with more they are hastened. Pure.

A fence waits for its operations to end by themselves, since tearing their session down ends those of other transfers
too. While fences keep so much of a pool that its engine can hardly work, waiting costs more than that.
"""

from collections.abc import Iterator
from typing import Final

from pdserve.kvd.book import Book, Timer
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd

HASTE: Final = 0.1
"""Of a fence's deadline is left to one that is hastened: some time, since most operations end soon after a cancel."""


def hasten(book: Book, engine_id: str, now: float) -> None:
    """To be called when a fence of an engine has begun to wait: all of them get less time where they keep too much."""
    entry = book.registry.get(engine_id)
    if entry is None:
        return
    most = book.limits.quarantine * entry.num_blocks
    fences = list(_fences(book, engine_id))
    # The quick count first, which takes a block of several leases for several.
    if sum(len(end.lease.block_ids) for _, end in fences) <= most:
        return
    if len({block for _, end in fences for block in end.lease.block_ids}) <= most:
        return
    for timer, end in fences:
        due = book.timers.get(timer)
        if due is None or end.fence is None or end.fence.overdue:  # its sessions are torn down already
            continue
        sooner = max(end.fence.since + HASTE * book.limits.fence, now)
        if sooner < due:
            book.timers.set(timer, sooner)


def _fences(book: Book, engine_id: str) -> Iterator[tuple[Timer, ProducerEnd | ConsumerEnd]]:
    """The ends of an engine that are fenced, with the names of their deadlines."""
    for transfer in book.by_engine.get(engine_id, {}).values():
        producer = transfer.producer
        if producer is not None and producer.engine_id == engine_id and producer.fence is not None:
            yield Timer("pfence", transfer.transfer_id), producer
        for consumer in transfer.consumers.values():
            if consumer.engine_id == engine_id and consumer.fence is not None:
                yield Timer("cfence", transfer.transfer_id, consumer.index), consumer
