"""What is measured of a session, on a link made by hand: time passes only in its copies."""

from dataclasses import dataclass, field

import pytest

from pdserve.kvd.plan import Runs
from pdserve.kvd.probing.measuring import BLOCKS, Landed, Measuring, blocks
from pdserve.kvd.probing.timing import Timing
from pdserve.kvd.probing.values import Measured
from pdserve.kvd.transport.port import Moved, Session
from pdserve.rpc.errors import TransferFailed

SIZE = 64 << 20


@dataclass
class Link:
    """A session, and each of its copies: a request costs `latency`, a byte 1 / `rate`."""

    rate: float
    latency: float = 1e-4
    loses: int = 0
    """Bytes that a copy of more than a block leaves out."""
    dies_after: int = 1 << 60
    """Copies until it fails."""
    now: float = 100.0
    longest: float = 0.0
    copied: list[int] = field(default_factory=list)

    def start(self, runs: Runs) -> "Copy":
        """See port.Session."""
        return Copy(self, runs)

    async def close(self) -> None:
        """See port.Session."""


@dataclass
class Copy:
    """See port.Copy."""

    link: Link
    runs: Runs

    def cancel(self) -> None:
        """See port.Copy."""

    async def wait(self) -> Moved:
        """Takes its time."""
        link, total = self.link, self.runs.total
        seconds = link.latency + total / link.rate
        link.now += seconds
        link.longest = max(link.longest, seconds)
        link.copied.append(total)
        if len(link.copied) > link.dies_after:
            raise TransferFailed("the peer is gone")
        return Moved(total - (link.loses if len(self.runs) > 1 else 0), int(seconds * 1e9), lanes="tcp/eth0")


async def measure(link: Link, seconds: float = 5.0, landed: bool = True) -> Measured:
    """All that is measured of it."""
    return await Measuring(link, SIZE, looked(landed), 1, lambda: link.now, link.now + seconds).measure()


def looked(landed: bool) -> Landed:
    """Whatever was copied."""

    async def look(runs: Runs) -> bool:
        return landed

    return look


async def nothing() -> None:
    """Nothing else is done."""


async def test_a_fast_link() -> None:
    """Latency of one small block, and for each block size the rate of copies as large as the memory."""
    link = Link(10e9)
    found = await measure(link)
    assert (found.lanes, found.error) == ("tcp/eth0", "")
    assert found.latency == pytest.approx(1e-4, rel=0.01)
    assert [speed.block_bytes for speed in found.speeds] == list(BLOCKS)
    assert {speed.nbytes for speed in found.speeds} == {SIZE}
    assert found.best == pytest.approx(10e9, rel=0.02)


@pytest.mark.parametrize("rate", [32e3, 1e6, 125e6])
async def test_a_slow_link_is_measured_with_less_and_not_held_up(rate: float) -> None:
    """No copy takes long, but for the smallest block that there is; block sizes that would are left out."""
    link = Link(rate)
    found = await measure(link, seconds=60.0)
    assert not found.error
    assert link.longest <= max(0.3, (16 << 10) / rate + 0.1)
    assert all(speed.rate == pytest.approx(rate, rel=0.05) for speed in found.speeds)
    assert len(found.speeds) == {32e3: 0, 1e6: 2, 125e6: 4}[rate]


@pytest.mark.parametrize(
    ("link", "landed", "words"),
    [
        (Link(1e9, loses=1), True, "not all are what was sent"),
        (Link(1e9), False, "not all are what was sent"),
        (Link(1e9, dies_after=30), True, "the peer is gone"),
    ],
    ids=["moves less", "moves something else", "fails"],
)
async def test_what_does_not_copy_rightly_is_no_speed(link: Link, landed: bool, words: str) -> None:
    """A transport that says it moved what is not there has no rate."""
    found = await measure(link, landed=landed)
    assert words in found.error
    assert all(speed.rate for speed in found.speeds)


async def test_time_runs_out() -> None:
    """What is measured by then stands, and that it is not all is said."""
    found = await measure(Link(200e6), seconds=1.5)
    assert found.latency
    assert "no time left" in found.error
    assert 0 < len(found.speeds) < len(BLOCKS)


async def test_the_time_to_open_a_session_is_not_that_of_its_copies() -> None:
    """A library's process that takes 9 s to start leaves its copies what the survey still has: here 1 s."""

    async def timed(link: Link) -> Measured:
        async def opening() -> Session:
            link.now += 9.0
            return link

        return await Timing(lambda: link.now, nothing).timed(opening(), SIZE, looked(True), 110.0)

    found = await timed(Link(10e9))
    assert (found.error, len(found.speeds)) == ("", len(BLOCKS))
    found = await timed(Link(200e6))
    assert "no time left" in found.error
    assert 0 < len(found.speeds) < len(BLOCKS)


@pytest.mark.parametrize(
    ("block", "rate", "count"),
    [(1 << 20, 100e9, 64), (1 << 20, 8 << 20, 2), (1 << 20, 1 << 20, 0), (16 << 10, 1 << 20, 16)],
)
def test_how_much_one_copy_is(block: int, rate: float, count: int) -> None:
    """All of the memory, as far as that takes a quarter of a second at most."""
    assert blocks(block, rate, SIZE) == count
