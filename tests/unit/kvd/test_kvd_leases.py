"""Leases and the count of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd.leases import IntegrityError, Leases

T = bytes(16)


def test_a_shared_block_is_free_when_its_last_lease_ends() -> None:
    """Two readers of one prefix count its blocks once, and only the second release frees them."""
    leases = Leases()
    a = leases.grant("e", T, (1, 2), writable=False, now=0, ttl=1)
    b = leases.grant("e", T, (2, 3), writable=False, now=0, ttl=1)
    assert leases.counts("e", 8).leased == 3
    leases.release(a)
    assert (leases.counts("e", 8).free, leases.counts("e", 8).leased) == (6, 2)
    leases.release(b)
    leases.release(b)
    assert leases.counts("e", 8).free == 8


def test_a_block_counts_under_its_gravest_state() -> None:
    """Quarantined before in flight before leased, each block once."""
    leases = Leases()
    leases.grant("e", T, (1, 2, 3), writable=False, now=0, ttl=1)
    flying = leases.grant("e", T, (2, 3), writable=False, now=0, ttl=1)
    flying.in_flight = 1
    barred = leases.grant("e", T, (3,), writable=False, now=0, ttl=1)
    barred.quarantined_at = 0.0
    counts = leases.counts("e", 4)
    assert (counts.free, counts.leased, counts.in_flight, counts.quarantined) == (1, 1, 1, 1)
    leases.check("e", 4)


def test_nothing_is_freed_under_an_operation() -> None:
    """Release while something reads or writes the blocks is refused."""
    leases = Leases()
    lease = leases.grant("e", T, (1,), writable=True, now=0, ttl=None)
    lease.in_flight = 1
    with pytest.raises(IntegrityError):
        leases.release(lease)
    assert leases.counts("e", 2).in_flight == 1


@pytest.mark.parametrize(
    ("held_writable", "asked_writable", "conflict"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_blocks_to_be_written_are_nobody_elses(held_writable: bool, asked_writable: bool, conflict: bool) -> None:
    """Readers share; a writer is alone, in either order."""
    leases = Leases()
    leases.grant("e", T, (5,), writable=held_writable, now=0, ttl=None)
    assert bool(leases.conflict("e", (4, 5), writable=asked_writable)) is conflict
    assert not leases.conflict("other", (4, 5), writable=asked_writable)


def test_a_writer_names_each_block_once() -> None:
    """Two prompt blocks cannot land in one block."""
    assert Leases().conflict("e", (1, 1), writable=True) == "a block is named twice"


def test_a_quarantined_lease_is_not_renewed() -> None:
    """What is on its way out gets no more time."""
    leases = Leases()
    lease = leases.grant("e", T, (1,), writable=False, now=0, ttl=1)
    leases.renew(lease, 5, 1)
    assert lease.expires_at == 6
    lease.quarantined_at = 0.0
    leases.renew(lease, 9, 1)
    assert lease.expires_at == 6


def test_books_that_disagree_are_found() -> None:
    """The check compares two books: a block that only one of them knows is an error."""
    leases = Leases()
    lease = leases.grant("e", T, (1, 2), writable=False, now=0, ttl=1)
    leases.check("e", 4)
    lease.block_ids.append(3)
    with pytest.raises(IntegrityError):
        leases.check("e", 4)


def test_an_engine_is_not_forgotten_while_blocks_are_held() -> None:
    """Forgetting an engine with a lease is a defect, with none it is clean."""
    leases = Leases()
    lease = leases.grant("e", T, (), writable=False, now=0, ttl=1)
    with pytest.raises(IntegrityError):
        leases.forget_engine("e")
    other = leases.grant("f", T, (1,), writable=False, now=0, ttl=1)
    leases.release(other)
    leases.forget_engine("f")
    assert lease.lease_id != other.lease_id


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 9), max_size=4)), max_size=60))
def test_grants_and_releases_in_any_order_add_up(actions: list[tuple[int, set[int]]]) -> None:
    """free + leased + in flight + quarantined = total after every step; all free at the end."""
    leases = Leases()
    held = []
    for choice, blocks in actions:
        if choice < 3:
            held.append(leases.grant("e", T, sorted(blocks), writable=False, now=0, ttl=1))
        elif held and choice == 3:
            leases.release(held.pop(0))
        elif held and choice == 4:
            leases.extend(held[-1], sorted(blocks - set(held[-1].block_ids)))
        elif held:
            held[0].quarantined_at = 0.0
        leases.check("e", 10)
    for lease in held:
        leases.release(lease)
    assert leases.counts("e", 10).free == 10
    assert leases.held_by("e") == 0
