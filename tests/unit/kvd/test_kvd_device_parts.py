"""From runs of regions to addresses and batches, against a byte by byte model."""

import numpy as np
import pytest

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.parts import Place, aligned, batches, parts_of, surely_inside

SIZES = ((4096, 64, 1024, 4096), (16, 9232, 32))
BASES = ((1 << 40, 1 << 20, 1 << 30, 1 << 50), (3 << 20, 5 << 40, 7 << 30))


def _where(side: int) -> list[int]:
    """The address of each byte of a region."""
    return [base + at for base, size in zip(BASES[side], SIZES[side], strict=True) for at in range(size)]


def _random(seed: int, count: int) -> Runs:
    random = np.random.default_rng(seed)
    print(f"seed {seed}")
    size = sum(SIZES[0])
    length = random.integers(1, 40, count) * 16
    src, dst = (random.integers(0, (size - 640) // 16, count) * 16 for _ in range(2))
    return Runs(*(column.astype(np.uint64) for column in (src, dst, length)))


def _bytes(runs: Runs) -> list[tuple[int, int]]:
    columns = (runs.src.tolist(), runs.dst.tolist(), runs.length.tolist())
    return sorted((at + i, to + i) for at, to, n in zip(*columns, strict=True) for i in range(n))


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_has_its_address_on_both_sides(seed: int) -> None:
    """Whatever borders of pieces a run lies over; no part leaves its piece."""
    runs = _random(seed, 200)
    parts = parts_of(runs, *(Place(base, size) for base, size in zip(BASES, SIZES, strict=True)))
    src, dst = _where(0), _where(1)
    expected = sorted((src[at], dst[to]) for at, to in _bytes(runs))
    assert _bytes(Runs(parts.src, parts.dst, parts.length)) == expected


@pytest.mark.parametrize(("most", "longest"), [(1024, 1 << 20), (1024, 64), (16, 16), (1 << 30, 1 << 20)])
def test_batches_hold_the_same_bytes_and_no_more_than_they_may(most: int, longest: int) -> None:
    """In order; a batch is larger only where it is one run."""
    runs = _random(9, 300)
    parts = list(batches(runs, most, longest))
    assert all(part.total <= most or len(part) == 1 for part in parts)
    assert all(int(part.length.max()) <= longest for part in parts)
    whole = Runs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "length")))
    assert _bytes(whole) == _bytes(runs)
    assert list(batches(Runs(*[np.empty(0, np.uint64)] * 3), most, longest)) == []


@pytest.mark.parametrize(("block", "sizes"), [(16, [256] * 4), (64, [256, 512, 256]), (256, [256, 512, 256])])
def test_blocks_of_one_size_go_in_few_batches_of_which_the_first_is_shorter(block: int, sizes: list[int]) -> None:
    """1 GiB in blocks of so many KiB, at most 512 MiB at a time: MiB of each batch. Nothing is copied of the runs."""
    length = np.full((1 << 30) // (block << 10), block << 10, np.uint64)
    runs = Runs(length, length, length)
    parts = list(batches(runs, 512 << 20))
    assert [part.total >> 20 for part in parts] == sizes
    assert all(np.shares_memory(part.length, length) for part in parts)


def test_one_short_run_beside_long_ones_makes_no_batch_too_large() -> None:
    """Runs are counted by the first one's length only where all are as long."""
    length = np.array([16, *[1 << 20] * 1000, 32], np.uint64)
    parts = list(batches(Runs(length, length, length), 64 << 20))
    assert all(part.total <= 64 << 20 for part in parts)
    assert np.concatenate([part.length for part in parts]).tolist() == length.tolist()


def test_runs_that_are_surely_inside_are_inside() -> None:
    """Never said of a run that leaves a region, also where offset and length add up to more than 64 bits hold; said
    up to the last byte where all runs are of one length."""

    def sure(*pieces: tuple[int, int, int]) -> bool:
        return surely_inside(Runs(*(np.array(column, np.uint64) for column in zip(*pieces, strict=True))), 4096, 8192)

    assert sure((0, 0, 64), (4032, 8128, 64))
    assert not sure((0, 0, 64), (4048, 0, 64))
    assert not sure((0, 0, 64), (0, 8144, 64))
    assert not sure((0, 0, 64), (0, 2**64 - 16, 64))
    assert not sure((0, 0, 16), (0, 0, 2**64 - 16))
    assert not sure((0, 0, 4096), (4080, 0, 16))  # inside, and not surely
    assert surely_inside(Runs(*[np.empty(0, np.uint64)] * 3), 0, 0)


def test_counting_what_begins_before_it_finds_an_offsets_piece() -> None:
    """The table as the kernel reads it: a power of two, filled up so that no offset lies behind its last entries."""
    place = Place(BASES[0], SIZES[0])
    starts, addresses = place.table()
    assert len(starts) & (len(starts) - 1) == 0
    for offset in range(0, place.size, 16):
        piece = int((starts <= offset).sum()) - 1
        assert addresses[piece] + offset - starts[piece] == int(place.at(np.array([offset], np.uint64))[0])
        assert min(starts[piece + 1], place.size) - offset == int(place.room(np.array([offset], np.uint64))[0])


def test_what_is_no_multiple_of_16_is_seen() -> None:
    """In any of the three columns."""
    good = Runs(*(np.array([32, 48], np.uint64) for _ in range(3)))
    assert aligned(good)
    for column in range(3):
        columns = [good.src.copy(), good.dst.copy(), good.length.copy()]
        columns[column][1] += np.uint64(8)
        assert not aligned(Runs(*columns))
