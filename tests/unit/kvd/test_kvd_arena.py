"""The range of addresses that regions are mapped in."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.kvd.transport.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    """64 MiB of addresses."""
    made = Arena([64 << 20])
    yield made
    made.close()
    made.close()


def memfd(size: int, fill: bytes = b"") -> int:
    """A file in memory that begins with `fill`."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, size)
    os.write(fd, fill)
    return fd


def offsets(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """As the arena takes them."""
    return np.array(values, np.uint64)


def test_what_is_mapped_is_the_file_itself(arena: Arena) -> None:
    """A copy into a mapping is seen by whoever else has the file, and the other way round."""
    a, b = memfd(8192, b"hello"), memfd(8192)
    try:
        at, to = arena.map(a, 8192), arena.map(b, 8192)
        arena.move(offsets(to + 10), offsets(at), offsets(5))
        assert os.pread(b, 5, 10) == b"hello"
        os.pwrite(a, b"HELLO", 0)
        arena.move(offsets(to), offsets(at), offsets(5))
        assert os.pread(b, 5, 0) == b"HELLO"
    finally:
        os.close(a)
        os.close(b)


def test_addresses_are_used_again_and_run_out_with_an_error(arena: Arena) -> None:
    """Mapping and unmapping for ever fits; more at once than there is room for is an OSError."""
    fd = memfd(8 << 20)
    try:
        for _ in range(50):
            arena.unmap(arena.map(fd, 8 << 20))
        taken = [arena.map(fd, 8 << 20) for _ in range(7)]
        assert len(set(taken)) == 7
        with pytest.raises(OSError, match="addresses"):
            arena.map(fd, 8 << 20)
        arena.unmap(taken[3])
        assert arena.map(fd, 8 << 20) == taken[3]
    finally:
        os.close(fd)


def test_room_is_joined_again_whatever_the_order(arena: Arena) -> None:
    """Regions of many sizes come and go at random: in the end the whole range is one piece again."""
    chance = random.Random(7)
    fd = memfd(64 << 20)
    mapped: list[int] = []
    try:
        for _ in range(300):
            if mapped and chance.random() < 0.5:
                arena.unmap(mapped.pop(chance.randrange(len(mapped))))
            elif len(mapped) < 12:
                mapped.append(arena.map(fd, chance.randrange(1, 4 << 20)))
        for at in mapped:
            arena.unmap(at)
        assert arena.map(fd, (64 << 20) - 4096) == 0
    finally:
        os.close(fd)


def test_less_is_reserved_where_there_is_less() -> None:
    """The first size that the process can have is taken; none at all is an OSError."""
    arena = Arena([1 << 62, 16 << 20])
    fd = memfd(8 << 20)
    assert arena.map(fd, 8 << 20) == 0
    with pytest.raises(OSError, match="addresses"):
        arena.map(fd, 8 << 20)
    os.close(fd)
    arena.close()
    with pytest.raises(OSError, match="no addresses"):
        Arena([1 << 62])


def test_a_file_that_cannot_be_mapped_takes_no_room(arena: Arena) -> None:
    """A bad descriptor raises and the next mapping is where it would have been."""
    with pytest.raises(OSError, match=r".*"):
        arena.map(-1, 4096)
    fd = memfd(4096)
    try:
        assert arena.map(fd, 4096) == 0
    finally:
        os.close(fd)
