"""The states of the two ends of a transfer: one enum and one table each.

    producer   NONE ─begin─▶ COMPUTING ─offer─▶ COMPLETE ─release─▶ FREED
               COMPUTING, COMPLETE ─stop/preempt─▶ FENCING ─freed─▶ FREED
                                                   FENCING ─again─▶ COMPUTING   (after a preemption)

    consumer   NONE ─accept─▶ RESERVED ─post─▶ FILLING ─land─▶ LANDED
               RESERVED ─land─▶ LANDED                         (nothing to fill)
               RESERVED, FILLING ─stop─▶ FENCING ─fenced─▶ FAILED

In FENCING an end's blocks are quarantined: nothing new is posted, what is in flight is awaited.
"""

import enum
from collections.abc import Mapping
from typing import Final


class IllegalTransition(Exception):
    """A defect of kvd itself: the table has no such step."""


class Producer(enum.Enum):
    """Where a producer's end is."""

    NONE = "none"
    COMPUTING = "computing"
    COMPLETE = "complete"
    FENCING = "fencing"
    FREED = "freed"


class ProducerEvent(enum.Enum):
    """What moves a producer's end."""

    BEGIN = "begin"
    OFFER = "offer"
    RELEASE = "release"
    """Every consumer is terminal and nothing went wrong."""
    PREEMPT = "preempt"
    STOP = "stop"
    AGAIN = "again"
    """The fence of a preemption is done."""
    FREE = "free"
    """The fence of a stop is done."""


class Consumer(enum.Enum):
    """Where a consumer's end is."""

    NONE = "none"
    RESERVED = "reserved"
    FILLING = "filling"
    FENCING = "fencing"
    LANDED = "landed"
    FAILED = "failed"


class ConsumerEvent(enum.Enum):
    """What moves a consumer's end."""

    ACCEPT = "accept"
    POST = "post"
    LAND = "land"
    STOP = "stop"
    FENCED = "fenced"


_P, _PE, _C, _CE = Producer, ProducerEvent, Consumer, ConsumerEvent

PRODUCER_TABLE: Final[Mapping[tuple[Producer, ProducerEvent], Producer]] = {
    (_P.NONE, _PE.BEGIN): _P.COMPUTING,
    (_P.COMPUTING, _PE.OFFER): _P.COMPLETE,
    (_P.COMPUTING, _PE.PREEMPT): _P.FENCING,
    (_P.COMPUTING, _PE.STOP): _P.FENCING,
    (_P.COMPLETE, _PE.PREEMPT): _P.FENCING,
    (_P.COMPLETE, _PE.STOP): _P.FENCING,
    (_P.COMPLETE, _PE.RELEASE): _P.FREED,
    (_P.FENCING, _PE.AGAIN): _P.COMPUTING,
    (_P.FENCING, _PE.FREE): _P.FREED,
}

CONSUMER_TABLE: Final[Mapping[tuple[Consumer, ConsumerEvent], Consumer]] = {
    (_C.NONE, _CE.ACCEPT): _C.RESERVED,
    (_C.RESERVED, _CE.POST): _C.FILLING,
    (_C.RESERVED, _CE.LAND): _C.LANDED,
    (_C.RESERVED, _CE.STOP): _C.FENCING,
    (_C.FILLING, _CE.LAND): _C.LANDED,
    (_C.FILLING, _CE.STOP): _C.FENCING,
    (_C.FENCING, _CE.FENCED): _C.FAILED,
}


def step_producer(state: Producer, event: ProducerEvent) -> Producer:
    """The next state; raises IllegalTransition where the table has none."""
    try:
        return PRODUCER_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"producer: {event.value} in {state.value}") from None


def step_consumer(state: Consumer, event: ConsumerEvent) -> Consumer:
    """The next state; raises IllegalTransition where the table has none."""
    try:
        return CONSUMER_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"consumer: {event.value} in {state.value}") from None
