"""One suite that every transport passes: what the port promises, and that a broken one is noticed."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from pdserve.kvd.config import MoriConfig, NixlConfig
from pdserve.kvd.plan import Planner, Runs
from pdserve.kvd.reshard import Share
from pdserve.kvd.testing import Fault, FaultPlan
from pdserve.kvd.testing.mori import to_env
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library
from pdserve.kvd.transport.mover import MakeMover, PythonMover, make_mover
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.port import MappedRegion, Session, Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.transport.sim import SimTransport
from pdserve.kvd.types import Division, Layout, MemoryKind, Part, RegionKey, Span
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.standing import standing_still

SIZE = 1 << 20
MakeTransport = Callable[[Arena, Library], Transport]
"""In an arena; the library is mori's fake."""

TRANSPORTS: dict[str, MakeTransport] = {
    "shm": lambda arena, _: ShmTransport(arena),
    "sim": lambda arena, _: SimTransport(arena, bandwidth=1e9, delay=0.001),
    "nixl": lambda arena, _: NixlTransport(arena, NixlConfig()),
    "mori on its fake": lambda arena, forked: MoriTransport(arena, MoriConfig(), forked, to_env()),
    "nixl over tcp": lambda arena, _: NixlTransport(arena, NixlConfig(tls="tcp")),
}


@dataclass
class Rig:
    """Two regions in an arena, filled with different noise."""

    arena: Arena
    src: MappedRegion
    dst: MappedRegion

    def bytes_of(self, region: MappedRegion) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """A copy of a region's bytes."""
        view = self.arena.view(region.offset, region.size)
        try:
            return np.frombuffer(bytes(view), dtype=np.uint8)
        finally:
            view.release()


def _map(arena: Arena, rank: int) -> MappedRegion:
    fd = os.memfd_create("rig")
    try:
        os.write(fd, np.random.default_rng(rank).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
        return MappedRegion(RegionKey("e", rank), MemoryKind.HOST, SIZE, arena.map(fd, SIZE))
    finally:
        os.close(fd)


MOVERS: dict[str, MakeMover] = {
    "as installed": make_mover,
    "python": lambda mapping, base: PythonMover(mapping, base, "a test"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each transport with each mover that it uses: nixl and mori copy in processes of their own, without one."""
    if "transport" in metafunc.fixturenames:
        ways = [(mover, name) for name in TRANSPORTS for mover in MOVERS if mover != "python" or name in ("shm", "sim")]
        metafunc.parametrize(("rig", "transport"), ways, indirect=True)
    elif "rig" in metafunc.fixturenames:
        metafunc.parametrize("rig", list(MOVERS), indirect=True)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Real memory, copied in each way; what is fake is said by each test."""
    arena = Arena([1 << 30], MOVERS[request.param])
    yield Rig(arena, _map(arena, 0), _map(arena, 1))
    arena.close()


@pytest.fixture
async def transport(request: pytest.FixtureRequest, rig: Rig, forked: Library) -> AsyncIterator[Transport]:
    """Each transport in turn; those that reach other nodes reach this one."""
    made = TRANSPORTS[request.param](rig.arena, forked)
    yield made
    await made.aclose()


def runs(*pieces: tuple[int, int, int]) -> Runs:
    """(source offset, destination offset, bytes) each."""
    src, dst, length = zip(*pieces, strict=True) if pieces else ((), (), ())
    return Runs(np.array(src, np.uint64), np.array(dst, np.uint64), np.array(length, np.uint64))


def scattered(seed: int, block: int, count: int) -> Runs:
    """Random blocks to random blocks."""
    random = np.random.default_rng(seed)
    print(f"seed {seed}")
    pick = [random.permutation(SIZE // block)[:count].astype(np.uint64) * np.uint64(block) for _ in range(2)]
    return Runs(pick[0], pick[1], np.full(count, block, np.uint64))


def applied(rig: Rig, plan: Runs) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """What the destination must hold after a plan."""
    expected, source = rig.bytes_of(rig.dst).copy(), rig.bytes_of(rig.src)
    for at, to, count in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
        expected[to : to + count] = source[at : at + count]
    return expected


@pytest.mark.parametrize("block", [1, 100, 4096, 300 << 10])
async def test_copies_these_bytes_and_no_others(transport: Transport, rig: Rig, block: int) -> None:
    """Scattered runs, tiny to large: the destination is as a plain copy makes it, the source untouched."""
    plan = scattered(block, block, min(200, SIZE // block))
    expected, source = applied(rig, plan), rig.bytes_of(rig.src)
    session = await transport.open(rig.src, rig.dst)
    moved = await session.start(plan).wait()
    assert (rig.bytes_of(rig.dst) == expected).all()
    assert (rig.bytes_of(rig.src) == source).all()
    assert (moved.nbytes, moved.cancelled) == (plan.total, False)
    assert moved.ns > 0
    await session.close()


async def test_blocks_are_taken_apart_and_put_together(transport: Transport, rig: Rig) -> None:
    """Blocks of 16 tokens with one of two heads into blocks of 48 with both: a run for each token."""
    src = _tokens_of_heads(0, 1, 16, 64)
    dst = _tokens_of_heads(0, 2, 48, 16)
    random = np.random.default_rng(7)
    blocks = random.permutation(64)[:45].tolist(), random.permutation(16)[:15].tolist()
    plan = Planner(src, dst, Share(0, 0, 0, 1)).plan([0], blocks[0], np.repeat(blocks[1], 3).tolist())
    assert len(plan) == 45 * 16
    expected = applied(rig, plan)
    session = await transport.open(rig.src, rig.dst)
    moved = await session.start(plan).wait()
    assert moved.nbytes == 45 * 16 * 256
    assert (rig.bytes_of(rig.dst) == expected).all()
    await session.close()


def _tokens_of_heads(first: int, heads: int, block_size: int, num_blocks: int) -> Layout:
    """Token after token, 256 bytes a head."""
    length = block_size * heads * 256
    division = Division(first, heads, 2, (Part("kv", 0, 0, heads * 256, 256, 1, 0, 256),))
    return Layout(block_size, num_blocks, ((Span(0, length, length),),), division)


async def test_nothing_to_copy_is_done_at_once(transport: Transport, rig: Rig) -> None:
    """An empty plan moves nothing and is terminal."""
    session = await transport.open(rig.src, rig.dst)
    moved = await session.start(runs()).wait()
    assert moved.nbytes == 0
    await session.close()


async def test_copies_of_one_session_keep_their_order(transport: Transport, rig: Rig) -> None:
    """Two copies to one place: the later one's bytes are there at the end."""
    session = await transport.open(rig.src, rig.dst)
    first, second = session.start(runs((0, 0, 4096))), session.start(runs((8192, 0, 4096)))
    await asyncio.gather(first.wait(), second.wait())
    assert (rig.bytes_of(rig.dst)[:4096] == rig.bytes_of(rig.src)[8192:12288]).all()
    await session.close()


@pytest.mark.parametrize(
    "bad",
    [(SIZE - 10, 0, 11), (0, SIZE - 10, 11), (0, 2 * SIZE, 1), (2**64 - 4096, 0, 8192), (0, 2**64 - 10, 11)],
)
async def test_a_run_that_leaves_its_region_copies_nothing(
    transport: Transport, rig: Rig, bad: tuple[int, int, int]
) -> None:
    """Refused before any byte moves, also the good runs beside it."""
    before = rig.bytes_of(rig.dst)
    session = await transport.open(rig.src, rig.dst)
    with pytest.raises(TransferFailed, match="leaves"):
        session.start(runs((0, 0, 4096), bad))
    assert (rig.bytes_of(rig.dst) == before).all()
    await session.close()


async def test_after_close_nothing_is_written_and_nothing_waits(transport: Transport, rig: Rig) -> None:
    """Close makes every copy terminal; what is in the destination then stays; a new copy is refused."""
    session = await transport.open(rig.src, rig.dst)
    copies = [session.start(scattered(i, 4096, 250)) for i in range(20)]
    await session.close()
    then = rig.bytes_of(rig.dst)
    results = await asyncio.wait_for(asyncio.gather(*(c.wait() for c in copies), return_exceptions=True), 5)
    assert all(isinstance(r, TransferFailed) or getattr(r, "nbytes", -1) >= 0 for r in results)
    await asyncio.sleep(0.01)
    assert (rig.bytes_of(rig.dst) == then).all()
    with pytest.raises(TransferFailed, match="closed"):
        session.start(runs((0, 0, 1)))
    await session.close()


async def test_a_cancelled_copy_is_terminal_and_says_so(transport: Transport, rig: Rig) -> None:
    """Cancelled behind others: it ends early, moved less than asked, and writes nothing later."""
    session = await transport.open(rig.src, rig.dst)
    ahead = [session.start(scattered(i, 4096, 250)) for i in range(20)]
    with standing_still(transport):
        copy = session.start(runs((0, 0, SIZE)))
        copy.cancel()
        copy.cancel()
    moved = await asyncio.wait_for(copy.wait(), 5)
    for one in ahead:
        await one.wait()
    assert moved.cancelled
    assert moved.nbytes < SIZE
    await session.close()


async def test_waiting_can_be_given_up_without_harm(transport: Transport, rig: Rig) -> None:
    """A waiter that is cancelled does not stop the copy: it still becomes terminal with all bytes."""
    session = await transport.open(rig.src, rig.dst)
    plan = scattered(3, 4096, 250)
    expected = applied(rig, plan)
    copy = session.start(plan)
    waiter = asyncio.create_task(copy.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)  # a fast copy may have been done first
    assert (await copy.wait()).nbytes == plan.total
    assert (rig.bytes_of(rig.dst) == expected).all()
    await session.close()


# -- the simulated link ---------------------------------------------------------------------


async def test_the_link_is_serial_and_as_slow_as_it_says(rig: Rig) -> None:
    """Two copies take their turns: together as long as both, and each one's delay comes on top once."""
    loop = asyncio.get_running_loop()
    transport = SimTransport(rig.arena, bandwidth=SIZE / 0.05, delay=0.02)
    session = await transport.open(rig.src, rig.dst)
    began = loop.time()
    await asyncio.gather(*(session.start(runs((0, 0, SIZE))).wait() for _ in range(2)))
    assert 0.119 <= loop.time() - began < 0.3
    await session.close()


@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK])
async def test_a_transport_that_lies_is_caught_by_this_suite(rig: Rig, fault: Fault) -> None:
    """Negative control: a mover that copies nothing, or the wrong block, fails the comparison above."""
    transport = SimTransport(rig.arena, 1e9, faults=FaultPlan([fault]))
    session = await transport.open(rig.src, rig.dst)
    plan = scattered(5, 4096, 100)
    expected = applied(rig, plan)
    assert (await session.start(plan).wait()).nbytes == plan.total
    assert not (rig.bytes_of(rig.dst) == expected).all()
    await session.close()


async def test_scripted_faults_fail_or_stall_one_copy_and_leave_the_next_alone(rig: Rig) -> None:
    """FAIL raises; STALL ends only with the session; None in the script is a good copy."""
    transport = SimTransport(rig.arena, 1e9, faults=FaultPlan([Fault.FAIL, None, Fault.STALL]))
    session = await transport.open(rig.src, rig.dst)
    with pytest.raises(TransferFailed, match="failed"):
        await session.start(runs((0, 0, 64))).wait()
    assert (await session.start(runs((0, 0, 64))).wait()).nbytes == 64
    stalled = session.start(runs((0, 0, 64)))
    stalled.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stalled.wait(), 0.05)
    await session.close()
    with pytest.raises(TransferFailed, match="closed"):
        await stalled.wait()


async def test_many_sessions_share_one_copy_thread(rig: Rig) -> None:
    """Copies of different sessions do not wait for each other's sessions to close."""
    transport = ShmTransport(rig.arena)
    sessions: list[Session] = [await transport.open(rig.src, rig.dst) for _ in range(5)]
    moved = await asyncio.gather(*(s.start(scattered(i, 4096, 50)).wait() for i, s in enumerate(sessions)))
    assert [m.nbytes for m in moved] == [50 * 4096] * 5
    await asyncio.gather(*(s.close() for s in sessions))
    await transport.aclose()
