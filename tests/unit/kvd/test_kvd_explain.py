"""The words that operators read: every pair of states, and the life of a transfer. The core alone."""

from collections.abc import Callable
from itertools import product

import pytest

from pdserve.kvd.book import Timer
from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.effects import Stop
from pdserve.kvd.ends import ConsumerEnd, ProducerEnd, Transfer
from pdserve.kvd.explain import bytes_wanted, stopped, waits_for
from pdserve.kvd.fences import Fence
from pdserve.kvd.leases import Lease
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk
from pdserve.kvd.progress import Progress
from pdserve.kvd.states import Consumer, Producer
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import Mode

T = b"transfer-0000001"
NOW = 100.0
STOP = Stop(Outcome.CANCELLED, "CANCELLED", "the client went away")
LEFT = {"park": 20.0, "lease": 30.0, "accept": 10.0, "transfer": 25.0, "pfence": 4.6, "cfence": 4.5}


def due(timer: Timer) -> float | None:
    """Every deadline runs, each with its own time left."""
    return NOW + LEFT[timer.kind]


def _producer(state: Producer, stop: Stop | None, operations: int) -> ProducerEnd:
    lease = Lease(1, "P", T, False, NOW, None, in_flight=operations)
    fence = Fence(NOW - 0.4, waits=True) if state is Producer.FENCING else None
    return ProducerEnd("P", "p", Progress(), lease, state, fence=fence, stop=stop)


def _consumer(index: int, state: Consumer, operations: int) -> ConsumerEnd:
    busy = state in (Consumer.FILLING, Consumer.FENCING)
    ops = set(range(index * 10, index * 10 + operations)) if busy else set()
    fence = Fence(NOW - 0.3, waits=True) if state is Consumer.FENCING else None
    lease = Lease(2 + index, "C", T, True, NOW, None)
    return ConsumerEnd(index, "C", f"c{index}", 0, (5,), lease, state=state, ops=ops, fence=fence)


def made(
    producer: Producer | None,
    *consumers: Consumer | None,
    mode: Mode = Mode.READ,
    stop: Stop | None = STOP,
    operations: int = 2,
) -> Transfer:
    """A transfer in these states; `stop` is a fencing producer's."""
    made_ = Transfer(T, mode, "P", NOW - 3)
    if producer is not None:
        made_.wanted = max(1, len(consumers))
        made_.producer = _producer(producer, stop if producer is Producer.FENCING else None, operations)
    for index, state in enumerate(consumers):
        if state is not None:
            made_.consumers[index] = _consumer(index, state, operations)
    return made_


PARK = "parked: the producer is not known yet, 20.0 s left"
OFFER = "waits for prefill's offer, its lease has 30.0 s left"
ACCEPT = "waits for decode's accept, 10.0 s left"
COPY = "copying, 2 operations, 25.0 s left"
MEMORY = "waits for the memory of a rank, 25.0 s left"
FENCE_P = "fencing since 0.4 s: 2 operations in flight, the session is closed in 4.6 s"
FENCE_C = "fencing since 0.3 s: 2 operations in flight, the session is closed in 4.5 s"
_P, _C = Producer, Consumer
CONSUMERS = (None, _C.NONE, _C.RESERVED, _C.FILLING, _C.FENCING, _C.LANDED, _C.FAILED)
WORDS: dict[Producer | None, tuple[str, ...]] = {  # one for each of CONSUMERS
    None: (PARK, PARK, PARK, f"{COPY}; {PARK}", f"{FENCE_C}; {PARK}", PARK, PARK),
    _P.NONE: ("nothing", "nothing", "nothing", COPY, FENCE_C, "nothing", "nothing"),
    _P.COMPUTING: (OFFER, OFFER, OFFER, f"{COPY}; {OFFER}", f"{FENCE_C}; {OFFER}", OFFER, OFFER),
    _P.COMPLETE: (ACCEPT, "nothing", MEMORY, COPY, FENCE_C, "nothing", "nothing"),
    _P.FENCING: (FENCE_P,) * 7,
    _P.FREED: ("nothing", "nothing", "nothing", COPY, FENCE_C, "nothing", "nothing"),
}


@pytest.mark.parametrize(("producer", "consumer"), list(product([None, *Producer], CONSUMERS)))
def test_every_pair_of_states_has_its_words(producer: Producer | None, consumer: Consumer | None) -> None:
    """READ: what is waited for and how long yet, for each pair of states, also those that last no time."""
    told = waits_for(made(producer, consumer), due, NOW)
    assert told == WORDS[producer][CONSUMERS.index(consumer)]


@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        (
            made(_P.COMPUTING, None, mode=Mode.WRITE),
            "waits for prefill's offer and decode's accept, its lease has 30.0 s left",
        ),
        (
            made(_P.COMPUTING, _C.RESERVED, mode=Mode.WRITE),
            "waits for prefill's next layers, its lease has 30.0 s left",
        ),
        (
            made(_P.COMPUTING, _C.FILLING, mode=Mode.WRITE, operations=1),
            "copying, 1 operation, 25.0 s left; waits for prefill's next layers, its lease has 30.0 s left",
        ),
        (made(_P.COMPLETE, _C.LANDED, None), "waits for 1 of 2 accepts, 10.0 s left"),
        (
            made(_P.COMPLETE, _C.FILLING, _C.FENCING),
            f"consumer 0: {COPY}; consumer 1: {FENCE_C}",
        ),
        (made(_P.FENCING, _C.FENCING, stop=None), f"preempted, {FENCE_P}"),
    ],
    ids=["write alone", "write reserved", "write filling", "n = 2", "one of two fails", "preempted"],
)
def test_what_is_particular_is_said(transfer: Transfer, told: str) -> None:
    """WRITE waits for layers and for both words, n > 1 names its consumers, a preemption is no stop."""
    assert waits_for(transfer, due, NOW) == told


def test_a_write_whose_bytes_are_all_there_waits_for_the_offer() -> None:
    """Paired and nothing missing, before the offer: layers are not waited for any more."""
    transfer = made(_P.COMPUTING, _C.FILLING, mode=Mode.WRITE, operations=0)
    transfer.consumers[0].paired, transfer.consumers[0].missing = True, 0
    assert waits_for(transfer, due, NOW) == OFFER


def test_a_deadline_that_does_not_run_is_not_shown() -> None:
    """No timer, no number."""
    assert waits_for(made(_P.COMPLETE, None), lambda _: None, NOW) == "waits for decode's accept"


def test_why_it_stops_is_the_transfers_or_the_first_ends() -> None:
    """Nothing stopped: None; one consumer given up: its reason; the transfer as a whole: that."""
    transfer = made(_P.COMPLETE, _C.FILLING, _C.FENCING)
    assert stopped(transfer) is None
    transfer.consumers[1].stop = STOP
    assert stopped(transfer) is STOP
    transfer.stop = whole = Stop(Outcome.FAILED, "PEER_LOST")
    assert stopped(transfer) is whole


@pytest.fixture
def driver() -> CoreDriver:
    """A core with a producer engine P and a consumer engine C of two ranks, two layers, 16 blocks."""
    made_ = CoreDriver(Limits(lease=30, accept=10, transfer=25, fence=5, park=20, tie=60))
    made_.engine("P", ranks=2)
    made_.engine("C", ranks=2)
    return made_


@pytest.fixture
def told(driver: CoreDriver) -> Callable[[], str]:
    """Says what the driver's one transfer waits for."""
    return lambda: waits_for(driver.core.book.transfers[T], driver.core.book.timers.get, driver.now)


def test_the_life_of_a_read(driver: CoreDriver, told: Callable[[], str]) -> None:
    """Parked, offered, copying, stopped, past the fence's bound: each is said with the time that is left."""
    driver.accept("C", "c", T, (5, 6), "P")
    driver.advance(7)
    assert told() == "parked: the producer is not known yet, 13.0 s left"
    driver.offer("P", "p", T, (3, 4))
    driver.advance(1.5)
    assert told() == "copying, 2 operations, 23.5 s left"
    transfer = driver.core.book.transfers[T]
    assert bytes_wanted(transfer, driver.registry) == 2 * 2 * 2 * 64
    driver.finish(min(driver.posts))
    assert told() == "copying, 1 operation, 23.5 s left"
    driver.cancel(T)
    driver.advance(0.4)
    assert told() == "fencing since 0.4 s: 1 operation in flight, the session is closed in 4.6 s"
    stop = stopped(transfer)
    assert stop is not None
    assert stop.reason == "CANCELLED"
    driver.advance(4.7)
    assert told() == "fencing since 5.1 s: 1 operation in flight, the session is being closed"


def test_the_life_of_a_preempted_write(driver: CoreDriver, told: Callable[[], str]) -> None:
    """Begun, copying layers, preempted, and from the beginning."""
    driver.begin("P", "p", T)
    driver.advance(2)
    assert told() == "waits for prefill's offer and decode's accept, its lease has 28.0 s left"
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1), layers=(0,), end=False)
    assert told() == "copying, 1 operation; waits for prefill's next layers, its lease has 28.0 s left"
    driver.retract("P", "p", 0, final=False)
    assert told() == "preempted, fencing since 0.0 s: 1 operation in flight, the session is closed in 5.0 s"
    driver.finish_all()
    assert told() == "waits for prefill's next layers, its lease has 30.0 s left"


def test_memory_that_has_not_come_is_waited_for(told: Callable[[], str], driver: CoreDriver) -> None:
    """Offer and accept are there and a rank's memory is not: said, and nothing is wanted of it yet."""
    driver.engine("N", ranks=2, mapped=False)
    driver.offer("P", "p", T, (3,))
    driver.accept("N", "n", T, (5,), "P")
    assert told() == "waits for the memory of a rank, 25.0 s left"
    assert bytes_wanted(driver.core.book.transfers[T], driver.registry) == 0
