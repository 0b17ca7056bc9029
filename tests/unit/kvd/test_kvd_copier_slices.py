"""Operations of many pieces: in slices, of which few are in memory, and between which all else goes on."""

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.kvd.copier import Copier
from pdserve.kvd.effects import Post
from pdserve.kvd.plan import DIVIDED, Planner, Runs
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.runs import nothing
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved, Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import PROTOCOL, Division, Layout, MemoryKind, Part, RegionKey, Span
from pdserve.kvd.views import Views
from pdserve.rpc.errors import TransferFailed

SRC, DST = RegionKey("P", 0), RegionKey("D", 0)
LAYERS, BLOCKS, TOKENS, HEADS, NBYTES = 2, 3000, 16, 2, 8
"""Of KV: `NBYTES` of K and as many of V for each token and head."""
BLOCK = TOKENS * HEADS * 2 * NBYTES
SIZE = LAYERS * BLOCKS * BLOCK
EACH = TOKENS * HEADS
"""Pieces of a block in a layer: K and V of a token and head lie together on both sides."""
PIECES = LAYERS * BLOCKS * EACH
SLICES = LAYERS * -(-BLOCKS * EACH // DIVIDED.slice)


def layout(step_stride: int, head_stride: int) -> Layout:
    """Blocks that lie side by side, layer after layer."""
    parts = tuple(Part(name, 0, at, step_stride, head_stride, 1, 0, NBYTES) for name, at in (("k", 0), ("v", NBYTES)))
    spans = tuple((Span(layer * BLOCKS * BLOCK, BLOCK, BLOCK),) for layer in range(LAYERS))
    return Layout(TOKENS, BLOCKS, spans, Division(0, HEADS, HEADS, parts))


TOKENS_FIRST, HEADS_FIRST = layout(2 * HEADS * NBYTES, 2 * NBYTES), layout(2 * NBYTES, TOKENS * 2 * NBYTES)


class Held:
    """A transport, its session, and copies that end when they are let; of less than `long` runs at once."""

    capabilities = Capabilities("held", frozenset(MemoryKind), same_node=True)

    def __init__(self, long: int = 1000) -> None:
        self.long = long
        self.started: list[HeldCopy] = []
        self.news = asyncio.Event()
        self.closed = False

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "Held":
        """See port.Transport."""
        return self

    def start(self, runs: Runs) -> "HeldCopy":
        """See port.Session."""
        if self.closed:
            raise TransferFailed("the session is closed")
        copy = HeldCopy(runs)
        if len(runs) < self.long:
            copy.end.set_result(Moved(runs.total, 1, lanes="lane"))
        else:
            self.started.append(copy)
            self.news.set()
        return copy

    async def begun(self, count: int) -> None:
        """So many long copies have begun."""
        async with asyncio.timeout(10.0):
            while len(self.started) < count:
                self.news.clear()
                await self.news.wait()

    async def close(self) -> None:
        """See port.Session."""
        self.closed = True

    async def aclose(self) -> None:
        """See port.Transport."""


class HeldCopy:
    """See port.Copy."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.cancelled = False
        self.end: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()

    def let(self, *, cancelled: bool = False) -> None:
        """It ends, whole or cancelled half way."""
        self.end.set_result(Moved(self.runs.total // (1 + cancelled), 10, cancelled, "lane"))

    def cancel(self) -> None:
        """See port.Copy."""
        self.cancelled = True

    async def wait(self) -> Moved:
        """See port.Copy."""
        return await self.end


class Rig:
    """A copier between tokens before heads and heads before tokens, and what it said of its operations."""

    def __init__(self, transport: Transport, offsets: tuple[int, int] = (0, 0)) -> None:
        registry = Registry()
        for key, lies in ((SRC, TOKENS_FIRST), (DST, HEADS_FIRST)):
            registry.hello(key.engine_id, 1, PROTOCOL, {"model": "m"})
            registry.add_region(key.engine_id, 0, Region(SIZE, MemoryKind.HOST, lies))
        at = dict(zip((SRC, DST), offsets, strict=True))
        self.sessions = Sessions((transport,), lambda key: MappedRegion(key, MemoryKind.HOST, SIZE, at[key]))
        self.ended: dict[int, tuple[Moved, str, str]] = {}
        self.news = asyncio.Event()
        self.defects: list[BaseException] = []
        self.copier = Copier(registry, self.sessions, self._ended, self.defects.append)

    def _ended(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        assert op_id not in self.ended, "an operation ended twice"
        self.ended[op_id] = (moved, transport, error)
        self.news.set()

    def post(self, op_id: int, src: range | list[int], dst: range | list[int]) -> None:
        """Some blocks of both layers."""
        self.copier.post(Post(op_id, bytes(16), SRC, DST, tuple(range(LAYERS)), tuple(src), tuple(dst)))

    async def until(self, count: int) -> None:
        """So many operations have ended."""
        async with asyncio.timeout(30.0):
            while len(self.ended) < count:
                self.news.clear()
                await self.news.wait()

    async def close(self) -> None:
        """All is over."""
        await self.sessions.aclose()
        await self.copier.aclose()
        assert not self.defects


def file(content: bytes) -> int:
    """A file in memory."""
    fd = os.memfd_create("slices")
    os.write(fd, content)
    os.ftruncate(fd, SIZE)
    return fd


def converted(source: NDArray[np.uint8], blocks: list[int]) -> NDArray[np.uint8]:
    """What the destination must hold: block i of a layer is block `blocks[i]` of the source, heads before tokens."""
    apart = source.reshape(LAYERS, BLOCKS, TOKENS, HEADS, 2 * NBYTES)
    return np.ascontiguousarray(apart[:, blocks].transpose(0, 1, 3, 2, 4)).ravel()


async def test_every_byte_is_in_its_place_after_many_slices() -> None:
    """Through the transport that really copies: one operation, one end, of all bytes."""
    assert SLICES > 4
    source = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
    blocks = np.random.default_rng(8).permutation(BLOCKS).tolist()
    arena = Arena([1 << 30])
    fds = [file(source.tobytes()), file(b"")]
    transport = ShmTransport(arena)
    rig = Rig(transport, (arena.map(fds[0], SIZE), to := arena.map(fds[1], SIZE)))
    rig.post(1, blocks, range(BLOCKS))
    await rig.until(1)
    moved, name, error = rig.ended[1]
    assert (moved.nbytes, moved.cancelled, name, error) == (SIZE, False, "shm", "")
    with arena.view(to, SIZE) as view:
        assert view == converted(source, blocks).tobytes()
    await rig.close()
    await transport.aclose()
    arena.close()
    for fd in fds:
        os.close(fd)


async def test_two_slices_are_alive_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompt: the one that is copied, and the one after it."""
    alive: dict[int, int] = {}
    most, made = 0, 0
    slices = Planner.slices

    def counted(self: Planner, *args: Any) -> Iterator[Runs]:
        nonlocal most, made
        for runs in slices(self, *args):
            made += 1
            alive[made] = len(runs)
            weakref.finalize(runs.length, alive.pop, made)
            most = max(most, sum(list(alive.values())))  # another thread may let one go
            yield runs
            del runs

    monkeypatch.setattr(Planner, "slices", counted)
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    for number in range(SLICES):
        await held.begun(number + 1)
        copy, held.started[number] = held.started[number], HeldCopy(nothing())  # held by the copier alone from now on
        copy.let()
        del copy
    await rig.until(1)
    assert made == SLICES
    assert DIVIDED.slice < most <= 2 * DIVIDED.slice < PIECES
    await rig.close()


async def test_other_operations_go_on_between_and_under_slices() -> None:
    """One slice of an operation is copied at a time; what is small begins and ends beside it, and the large one says
    at its end what all of its slices moved."""
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    for number in range(SLICES):
        await held.begun(number + 1)
        rig.post(10 + number, [number], [number])
        await rig.until(number + 1)
        assert 1 not in rig.ended
        assert len(held.started) == number + 1
        held.started[number].let()
    await rig.until(SLICES + 1)
    assert rig.ended[1] == (Moved(SIZE, 10 * SLICES, lanes="lane"), "held", "")
    assert rig.ended[10] == (Moved(LAYERS * BLOCK, 1, lanes="lane"), "held", "")
    await rig.close()


async def test_the_loop_plans_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On it at most what is quick, and in a thread at most a slice: nothing else waits for longer than that."""
    loop, on_loop, aside = threading.get_ident(), list[int](), list[int]()
    planned = Views.plan

    def noted(self: Views, layers: Any, src: Any, *more: Any) -> Runs:
        where = on_loop if threading.get_ident() == loop else aside
        where.append(len(layers) * len(src) * self.each)
        return planned(self, layers, src, *more)

    monkeypatch.setattr(Views, "plan", noted)
    rig = Rig(Held(long=PIECES))
    quick = DIVIDED.quick // (EACH * LAYERS)
    for op_id, count in enumerate((1, quick, quick + 1, BLOCKS)):
        rig.post(op_id, range(count), range(count))
    await rig.until(4)
    assert on_loop == [EACH * LAYERS, quick * EACH * LAYERS]
    assert max(on_loop) <= DIVIDED.quick
    assert max(aside) <= DIVIDED.slice
    assert sum(aside) == (quick + 1) * EACH * LAYERS + PIECES
    await rig.close()


@pytest.mark.parametrize("heeds", [True, False], ids=["which ends early", "which is done all the same"])
async def test_a_cancelled_operation_ends_with_its_present_slice(heeds: bool) -> None:
    """The copy under way is asked to end, and is waited for; nothing begins after it, and the bytes are counted."""
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    await held.begun(1)
    held.started[0].let()
    await held.begun(2)
    rig.copier.cancel(1)
    assert held.started[1].cancelled
    for _ in range(20):
        await asyncio.sleep(0)
    assert not rig.ended, "something of it is still in flight"
    held.started[1].let(cancelled=heeds)
    await rig.until(1)
    moved, _, error = rig.ended[1]
    first, second = (copy.runs.total for copy in held.started)
    assert (error, moved.cancelled) == ("cancelled", True)
    assert moved.nbytes == first + (second // 2 if heeds else second)
    assert len(held.started) == 2
    await rig.close()


async def test_a_cancel_while_the_first_slice_is_planned_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation ends once the thread is done with that slice, which is not begun."""
    planning, let = threading.Event(), threading.Event()
    planned = Views.plan

    def slow(self: Views, *args: Any) -> Runs:
        planning.set()
        assert let.wait(10.0)
        return planned(self, *args)

    monkeypatch.setattr(Views, "plan", slow)
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    assert await asyncio.to_thread(planning.wait, 10.0)
    rig.copier.cancel(1)
    let.set()
    await rig.until(1)
    assert rig.ended[1] == (Moved(0, 0, cancelled=True), "held", "cancelled")
    assert not held.started
    await rig.close()


async def test_a_slice_that_fails_is_the_operations_end() -> None:
    """The next one, which is planned by then, is not begun, and the error is told once."""
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    await held.begun(1)
    held.started[0].let()
    await held.begun(2)
    held.started[1].end.set_exception(TransferFailed("no way"))
    await rig.until(1)
    assert rig.ended[1][1:] == ("held", "no way")
    assert len(held.started) == 2
    await rig.close()


async def test_a_session_that_is_closed_between_two_slices_ends_the_operation() -> None:
    """As a fence that is overdue does it: the next slice finds the session closed."""
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    await held.begun(1)
    await rig.sessions.close((SRC, DST))
    held.started[0].let()
    await rig.until(1)
    assert rig.ended[1][1:] == ("held", "the session is closed")
    assert len(held.started) == 1
    await rig.close()


async def test_a_bad_block_in_the_last_slice_is_refused_before_the_first() -> None:
    """Nothing is copied of what cannot be copied whole."""
    held = Held()
    rig = Rig(held)
    rig.post(1, range(BLOCKS), [*range(BLOCKS - 1), BLOCKS])
    await rig.until(1)
    assert "destination block" in rig.ended[1][2]
    assert not held.started
    await rig.close()


class Mortal(Held):
    """A transport whose first session is over when the test says so; the next one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.opened: list[Mortal] = []

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "Mortal":
        """See port.Transport."""
        session = Mortal()
        session.started, session.news = self.started, self.news
        self.opened.append(session)
        return session

    def start(self, runs: Runs) -> "HeldCopy":
        """See port.Session."""
        if self.over:
            raise TransferFailed("takes no more")
        return super().start(runs)


async def test_a_session_that_is_over_between_two_slices_is_followed_by_another() -> None:
    """As when a library's process retires for another peer: this operation's copies come to their ends all the same,
    and what is left of it goes over the next session. Nobody hears of a failure."""
    transport = Mortal()
    rig = Rig(transport)
    rig.post(1, range(BLOCKS), range(BLOCKS))
    for number in range(SLICES):
        await transport.begun(number + 1)
        if number == 1:
            transport.opened[0].over = True
        transport.started[number].let()
    await rig.until(1)
    assert rig.ended[1] == (Moved(SIZE, 10 * SLICES, lanes="lane"), "held", "")
    assert len(transport.opened) == 2
    await rig.close()
    assert [session.closed for session in transport.opened] == [True, True]
