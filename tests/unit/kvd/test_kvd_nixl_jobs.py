"""How the nixl process cuts a copy up, over lanes that copy while a read is begun and over those that do not."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from pdserve.kvd.plan import Offsets
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.chunks import PIECE_BYTES, WINDOW, Pace
from pdserve.kvd.transport.nixl_jobs import Job

BLOCK = PIECE_BYTES // 4
CHUNK = 4 * PIECE_BYTES
"""Of a Pace that has seen nothing."""


@dataclass
class Reading:
    """See nixl_jobs.Reading."""

    nbytes: int
    at_once: bool
    here: bool

    def done(self) -> bool:
        """Whether it is."""
        return self.here


@dataclass
class Lane:
    """nixl_jobs.Reader, at a speed of its own clock."""

    at_once: bool
    rate: float = 1e9
    now: float = 0.0
    begun: list[Reading] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)

    def read(self, peer: str, src: Offsets, dst: Offsets, length: Offsets) -> Reading:
        """Over cma the bytes are here when it returns."""
        assert peer == "peer"
        made = Reading(int(length.sum()), self.at_once, self.at_once)
        self.begun.append(made)
        self.places += zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)
        if self.at_once:
            self.now += made.nbytes / self.rate
        return made

    def come(self, most: int = WINDOW) -> None:
        """So many of those that were begun are here."""
        for one in [one for one in self.begun if not one.here][:most]:
            one.here = True
            self.now += one.nbytes / self.rate

    def clock(self) -> float:
        """Seconds."""
        return self.now


def job(nbytes: int, lane: Lane) -> Job:
    """A copy of blocks, every second one of a region, to the place of the next."""
    at = np.arange(nbytes // BLOCK, dtype=np.uint64) * np.uint64(2 * BLOCK)
    length = np.full(len(at), BLOCK, np.uint64)
    columns = (at.tobytes(), (at + np.uint64(BLOCK)).tobytes(), length.tobytes())
    return Job(wire.Copy(1, "region", "peer", 1 << 40, *columns), 1 << 41, lane.now)


def run(one: Job, lane: Lane, pace: Pace) -> list[int]:
    """To its end; how many reads each step has begun."""
    counts = []
    while not one.over:
        before = len(lane.begun)
        one.step(lane, pace, lane.clock)
        counts.append(len(lane.begun) - before)
        lane.come()
    return counts


@pytest.mark.parametrize("at_once", [True, False])
def test_every_block_is_read_once_from_its_place_to_its_place(at_once: bool) -> None:
    """In order, from the base of the peer's region to the address of ours, whatever carries it."""
    lane = Lane(at_once)
    one = job(64 * PIECE_BYTES, lane)
    run(one, lane, Pace())
    starts = [(2 * i * BLOCK, (2 * i + 1) * BLOCK) for i in range(64 * PIECE_BYTES // BLOCK)]
    assert lane.places == [((1 << 40) + src, (1 << 41) + dst, BLOCK) for src, dst in starts]
    assert one.moved == one.total == 64 * PIECE_BYTES


def test_what_is_copied_while_it_is_begun_is_begun_alone() -> None:
    """One read a step, so that kvd is heard between any two; once the speed is known each takes 16 ms, and no step goes
    by that begins nothing."""
    lane, pace = Lane(at_once=True), Pace()
    run(job(8 * CHUNK, lane), lane, pace)
    before = len(lane.begun)
    counts = run(job(8 * CHUNK, lane), lane, pace)
    assert set(counts) == {1}
    assert [one.nbytes for one in lane.begun[before:-1]] == [int(0.016 * lane.rate) // BLOCK * BLOCK] * (
        len(counts) - 1
    )


def test_what_comes_later_is_two_chunks_ahead() -> None:
    """The next one waits while one is on its way, and both together take 8 ms."""
    lane, pace = Lane(at_once=False), Pace()
    run(job(8 * CHUNK, lane), lane, pace)
    before = len(lane.begun)
    one = job(8 * CHUNK, lane)
    assert not one.step(lane, pace, lane.clock)
    assert not one.step(lane, pace, lane.clock)
    assert [read.nbytes for read in lane.begun[before:]] == [int(0.004 * lane.rate) // BLOCK * BLOCK] * WINDOW


def test_a_short_end_that_is_here_at_once_leaves_the_window_as_it_is() -> None:
    """Over the network the last blocks may come while they are asked for: the next copy's chunks are two all the
    same."""
    lane, pace = Lane(at_once=False), Pace()
    one = job(2 * CHUNK + BLOCK, lane)
    one.step(lane, pace, lane.clock)
    lane.come()
    lane.at_once = True
    while not one.over:
        one.step(lane, pace, lane.clock)
    assert pace.window == WINDOW


@pytest.mark.parametrize(("at_once", "most"), [(True, 1), (False, WINDOW)])
def test_a_cancelled_copy_begins_nothing_more(at_once: bool, most: int) -> None:
    """It is over with what was begun, and says how much that was."""
    lane, pace = Lane(at_once), Pace()
    run(job(8 * CHUNK, lane), lane, pace)
    before = len(lane.begun)
    one = job(8 * CHUNK, lane)
    one.step(lane, pace, lane.clock)
    one.cancelled = True
    while not one.over:
        lane.come(1)
        one.step(lane, pace, lane.clock)
    assert len(lane.begun) - before == most
    assert 0 < one.moved == sum(read.nbytes for read in lane.begun[before:]) < one.total
