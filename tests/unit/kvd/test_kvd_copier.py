"""Operations that are cancelled while their session opens."""

import asyncio

from pdserve.kvd.copier import Copier
from pdserve.kvd.effects import Post
from pdserve.kvd.plan import Runs
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.testing import plain_layout
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved
from pdserve.kvd.types import PROTOCOL, MemoryKind, RegionKey

LAYOUT = plain_layout(4, layers=1)
SIZE = 4 * 4096
SRC, DST = RegionKey("P", 0), RegionKey("D", 0)


class Slow:
    """A transport that opens when it is let, and its session, whose copies are done at once."""

    capabilities = Capabilities("slow", frozenset(MemoryKind), same_node=True)

    def __init__(self) -> None:
        self.opening = asyncio.Event()
        self.let = asyncio.Event()
        self.copied = 0

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "Slow":
        """See port.Transport."""
        self.opening.set()
        await self.let.wait()
        return self

    def start(self, runs: Runs) -> "Slow":
        """See port.Session."""
        self.copied += 1
        return self

    def cancel(self) -> None:
        """See port.Copy."""

    async def wait(self) -> Moved:
        """See port.Copy."""
        return Moved(4096, 1)

    async def close(self) -> None:
        """See port.Session."""

    async def aclose(self) -> None:
        """See port.Transport."""


class Rig:
    """A copier over a slow transport, and what it said of its operations."""

    def __init__(self) -> None:
        self.slow = Slow()
        registry = Registry()
        for key in (SRC, DST):
            registry.hello(key.engine_id, 1, PROTOCOL, {"model": "m"})
            registry.add_region(key.engine_id, 0, Region(SIZE, MemoryKind.HOST, LAYOUT))
        self.sessions = Sessions((self.slow,), lambda key: MappedRegion(key, MemoryKind.HOST, SIZE, 0))
        self.ended: dict[int, str] = {}
        self.news = asyncio.Event()
        self.defects: list[BaseException] = []
        self.copier = Copier(registry, self.sessions, self._ended, self.defects.append)

    def _ended(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        assert op_id not in self.ended, "an operation ended twice"
        self.ended[op_id] = error
        self.news.set()

    def post(self, op_id: int) -> None:
        """One block."""
        self.copier.post(Post(op_id, bytes(16), SRC, DST, (0,), (1,), (2,)))

    async def until(self, count: int) -> None:
        """So many operations have ended."""
        async with asyncio.timeout(5.0):
            while len(self.ended) < count:
                self.news.clear()
                await self.news.wait()

    async def close(self) -> None:
        """All is over."""
        await self.sessions.aclose()
        await self.copier.aclose()
        assert not self.defects


async def test_a_cancelled_operation_does_not_wait_for_its_session() -> None:
    """It ends at once; the session opens on, for the other operation that waits for it."""
    rig = Rig()
    rig.post(1)
    rig.post(2)
    await asyncio.wait_for(rig.slow.opening.wait(), 5.0)
    rig.copier.cancel(1)
    rig.copier.cancel(1)
    await rig.until(1)
    assert rig.ended == {1: "cancelled"}
    rig.slow.let.set()
    await rig.until(2)
    assert (rig.ended, rig.slow.copied) == ({1: "cancelled", 2: ""}, 1)
    await rig.close()


async def test_a_cancel_that_crosses_the_opening_ends_the_operation_once() -> None:
    """The session is open, and the operation has not run since: cancelled, nothing is copied, the session stays."""
    rig = Rig()
    rig.post(1)
    await asyncio.wait_for(rig.slow.opening.wait(), 5.0)
    rig.slow.let.set()
    for _ in range(2):
        await asyncio.sleep(0)
    rig.copier.cancel(1)
    await rig.until(1)
    assert rig.ended[1] in ("cancelled", "")
    rig.post(2)
    await rig.until(2)
    assert rig.ended[2] == ""
    await rig.close()


async def test_a_cancel_before_the_operation_has_run_at_all() -> None:
    """Nothing is opened for it."""
    rig = Rig()
    rig.post(1)
    rig.copier.cancel(1)
    await rig.until(1)
    assert rig.ended == {1: "cancelled"}
    assert not rig.slow.opening.is_set()
    await rig.close()
