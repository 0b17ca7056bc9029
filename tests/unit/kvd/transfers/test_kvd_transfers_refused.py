"""What the core refuses, with which reason, and that nothing is copied then."""

import pytest

from pdserve.kvd.client.messages import Outcome
from pdserve.kvd.limits import Limits
from pdserve.kvd.notices import Chunk
from pdserve.kvd.testing import CoreDriver
from pdserve.kvd.types import PROTOCOL, Mode
from pdserve.rpc.errors import InvalidRequest
from tests.unit.kvd.transfers.ends import T, U, all_free, how


def test_a_transfer_is_used_once(driver: CoreDriver) -> None:
    """A second producer and a second consumer are refused, while it is open and after its end."""
    driver.offer("P", "p", T, (3,))
    driver.offer("P", "p2", T, (4,))
    driver.accept("C", "c", T, (5,), "P")
    driver.accept("C", "c2", T, (6,), "P")
    driver.finish_all()
    driver.offer("P", "p3", T, (4,))
    driver.accept("C", "c3", T, (6,), "P")
    for engine, handle in (("P", "p2"), ("P", "p3"), ("C", "c2"), ("C", "c3")):
        assert how(driver, engine, handle) == (Outcome.FAILED, "TRANSFER_USED"), handle
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
    assert all_free(driver, "P", "C")


def test_the_same_said_twice_changes_nothing(driver: CoreDriver) -> None:
    """A participant that comes back says what is open again: no second end, no second copy."""
    for _ in range(2):
        driver.begin("P", "p", T)
        driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    for _ in range(2):
        driver.offer("P", "p", T, (3,), mode=Mode.WRITE)
    assert len(driver.posted) == 1
    driver.finish_all()
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    assert how(driver, "C", "c") == (Outcome.LANDED, "")


def test_a_handle_of_another_end_is_refused(driver: CoreDriver) -> None:
    """A live handle cannot name a second transfer: InvalidRequest, and the first is unharmed."""
    driver.begin("P", "p", T)
    with pytest.raises(InvalidRequest, match="in use"):
        driver.begin("P", "p", U)
    with pytest.raises(InvalidRequest, match="in use"):
        driver.accept("P", "p", T, (1,), "P")
    with pytest.raises(InvalidRequest, match="characters"):
        driver.begin("P", "", U)
    assert not driver.ends


def test_a_producer_whose_consumers_have_all_gone_is_ended_at_once(driver: CoreDriver) -> None:
    """Found by the state machine: the only consumer gave up, one too many waits, chunks came early."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.retract("C", "c", final=True)
    driver.accept("C", "extra", T, (6,), "P", mode=Mode.WRITE, consumer=1)
    driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    driver.begin("P", "p", T)
    assert how(driver, "P", "p") == (Outcome.FAILED, "CONSUMER_FAILED")
    assert how(driver, "C", "extra") == (Outcome.FAILED, "INVALID_REQUEST")
    assert all_free(driver, "P", "C")


def test_engines_that_differ_are_refused_and_named(driver: CoreDriver) -> None:
    """Another identity: the consumer hears what differs, the producer that its consumer failed."""
    driver.registry.hello("X", 1, PROTOCOL, {"model": "other"})
    driver.offer("P", "p", T, (3,))
    driver.accept("X", "x", T, (5,), "P")
    assert how(driver, "X", "x") == (Outcome.FAILED, "INCOMPATIBLE_ENGINES")
    assert "model: m != other" in driver.ends["X", "x"].detail
    assert how(driver, "P", "p") == (Outcome.FAILED, "CONSUMER_FAILED")


@pytest.mark.parametrize(
    ("ranks", "layers", "block_size", "name"), [(2, 2, 16, "ranks"), (1, 3, 16, "layers"), (1, 2, 32, "block_size")]
)
def test_memory_that_does_not_fit_is_refused_by_name(
    driver: CoreDriver, ranks: int, layers: int, block_size: int, name: str
) -> None:
    """Unequal ranks, layers or block size, whatever the identities say: refused at pairing."""
    driver.engine("X", ranks=ranks, layers=layers, block_size=block_size)
    driver.offer("P", "p", T, (3,))
    driver.accept("X", "x", T, (5,), "P")
    assert how(driver, "X", "x") == (Outcome.FAILED, "INCOMPATIBLE_ENGINES")
    assert name in driver.ends["X", "x"].detail
    assert not driver.posted


def test_an_engine_that_is_unknown_or_over_is_stale(driver: CoreDriver) -> None:
    """A ticket of an epoch that never was here, or has ended: STALE_EPOCH at once."""
    driver.accept("C", "c1", T, (5,), "nobody")
    driver.die("P")
    driver.accept("C", "c2", U, (5,), "P")
    assert how(driver, "C", "c1") == (Outcome.FAILED, "STALE_EPOCH")
    assert how(driver, "C", "c2") == (Outcome.FAILED, "STALE_EPOCH")
    assert not driver.core.book.transfers


@pytest.mark.parametrize(
    ("blocks", "first", "told"),
    [((5, 5), 0, "twice"), ((16,), 0, "of 16"), ((5, 6), 0, "on offer"), ((5,), 1, "on offer"), ((9,), 0, "held")],
)
def test_blocks_that_cannot_be_filled_are_refused(
    driver: CoreDriver, blocks: tuple[int, ...], first: int, told: str
) -> None:
    """Named twice, outside the pool, more than offered, or held for another transfer."""
    driver.offer("C", "own", U, (9,))
    driver.offer("P", "p", T, (3,))
    driver.accept("C", "c", T, blocks, "P", first=first)
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    assert told in driver.ends["C", "c"].detail
    assert not driver.posted


@pytest.mark.parametrize(
    ("offered", "told"),
    [((), "without blocks"), ((3, 3), "twice"), ((16,), "of 16"), ((4,), "other blocks"), ((5,), "filled")],
)
def test_an_offer_that_cannot_be_is_refused(driver: CoreDriver, offered: tuple[int, ...], told: str) -> None:
    """Empty, a block twice, outside the pool, not what its chunks said, or being filled: both ends hear it."""
    driver.begin("P", "p", T)
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    if told == "other blocks":
        driver.step("P", 1, Chunk("p", 0, 0, (3,), 1))
    if told == "filled":
        driver.accept("P", "mine", U, (5,), "C")
    driver.offer("P", "p", T, offered, mode=Mode.WRITE)
    driver.finish_all()
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    assert told in driver.ends["P", "p"].detail


def test_the_ends_must_agree_on_the_transfer(driver: CoreDriver) -> None:
    """Another mode, another producer, a consumer that is not wanted: each refused."""
    driver.accept("C", "c", T, (5,), "P", mode=Mode.WRITE)
    driver.begin("C", "thief", T)
    assert how(driver, "C", "thief") == (Outcome.FAILED, "TICKET_REFUSED")
    driver.begin("P", "p", T, Mode.READ)
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    driver.accept("C", "d", U, (5,), "P", consumer=1)
    driver.offer("P", "q", U, (3,), consumers=1)
    assert how(driver, "C", "d") == (Outcome.FAILED, "INVALID_REQUEST")
    driver.accept("C", "e", U, (5,), "P", consumer=0)
    driver.finish_all()
    assert how(driver, "P", "q") == (Outcome.RELEASED, "")


@pytest.mark.parametrize("tid", [b"", b"short", bytes(17)])
def test_a_transfer_id_is_16_bytes(driver: CoreDriver, tid: bytes) -> None:
    """Anything else ends the handle at once."""
    driver.begin("P", "p", tid)
    driver.accept("C", "c", tid, (5,), "P")
    assert how(driver, "P", "p") == (Outcome.FAILED, "INVALID_REQUEST")
    assert how(driver, "C", "c") == (Outcome.FAILED, "INVALID_REQUEST")
    with pytest.raises(InvalidRequest):
        driver.cancel(tid)


def test_new_transfers_are_refused_when_full_or_draining() -> None:
    """Too many parked: OVERLOADED. Draining: as if kvd were away, while an open one goes on."""
    driver = CoreDriver(Limits(max_parked=1))
    driver.engine("P")
    driver.engine("C")
    driver.accept("C", "c", T, (5,), "P")
    driver.accept("C", "d", U, (6,), "P")
    assert how(driver, "C", "d") == (Outcome.FAILED, "OVERLOADED")
    driver.core.draining = True
    driver.offer("P", "p", T, (3,))
    driver.offer("P", "q", b"transfer-0000003", (4,))
    driver.finish_all()
    assert how(driver, "P", "q") == (Outcome.FAILED, "KVD_UNAVAILABLE")
    assert how(driver, "C", "c") == (Outcome.LANDED, "")
