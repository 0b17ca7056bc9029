"""Sessions one by one; any order of events is the machine's, beside this."""

import asyncio

import pytest
from structlog.testing import capture_logs

from pdserve.kvd.peers.guests import FarRegion
from pdserve.kvd.plan import Runs
from pdserve.kvd.registry import Region
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.testing import plain_layout
from pdserve.kvd.transport.port import Capabilities, Copy, MappedRegion, RemoteRegion
from pdserve.kvd.types import MemoryKind, RegionKey
from pdserve.rpc.errors import TransferFailed

SRC, DST = RegionKey("P", 0), RegionKey("D", 0)
WAIT_S = 5.0
HOST = MemoryKind.HOST


class Broken:
    """A transport, and its session, whose close fails once it is let."""

    capabilities = Capabilities("broken", frozenset(MemoryKind), same_node=True)

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.let = asyncio.Event()

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "Broken":
        """See port.Transport."""
        return self

    def start(self, runs: Runs) -> Copy:
        """See port.Session."""
        raise NotImplementedError

    async def close(self) -> None:
        """See port.Session."""
        self.closing.set()
        await self.let.wait()
        raise RuntimeError("the link does not close")

    async def aclose(self) -> None:
        """See port.Transport."""


@pytest.mark.parametrize("cancelled", [False, True], ids=["waits", "cancelled"])
async def test_a_close_that_fails_is_logged_whoever_waits(cancelled: bool) -> None:
    """The caller gets the error, and where it was cancelled meanwhile the log still has it."""
    transport = Broken()
    sessions = Sessions((transport,), lambda key: MappedRegion(key, MemoryKind.HOST, 4096, 0))
    await sessions.get(SRC, DST)
    with capture_logs() as logs:
        caller = asyncio.create_task(sessions.close((SRC, DST)))
        await asyncio.wait_for(transport.closing.wait(), 5)
        (closer,) = sessions._closing
        if cancelled:
            caller.cancel()
        transport.let.set()
        await asyncio.wait([closer, caller], timeout=5)
        assert caller.cancelled() if cancelled else isinstance(caller.exception(), RuntimeError)
    (said,) = [entry for entry in logs if entry["event"] == "session_not_closed"]
    assert (said["src"], said["dst"], str(said["exc_info"])) == (str(SRC), str(DST), "the link does not close")
    assert not sessions._closing


class Mortal:
    """A session with another node that is over when the test says so; see port.FarSession."""

    def __init__(self, card: bytes) -> None:
        self.card = card
        self.over = False
        self.closed = False

    def start(self, runs: Runs) -> Copy:
        """See port.Session."""
        raise NotImplementedError

    async def close(self) -> None:
        """See port.Session."""
        self.closed = True


class Far:
    """The other node: its cards, and the transport that takes the last of them alone."""

    capabilities = Capabilities("far", frozenset(MemoryKind), same_node=False, other_node=True)

    def __init__(self) -> None:
        self.good = b"first"
        self.known: FarRegion | None = None
        self.news = asyncio.Event()
        self.send()
        self.sessions = Sessions((self,), lambda key: None if key == SRC else MappedRegion(key, HOST, 4096, 0), self)

    def send(self) -> None:
        """The card that is good now comes from the other node."""
        layout = plain_layout(4, 1, 64, 16)
        self.known = FarRegion(SRC, Region(4096, HOST, layout), {"far": self.good})
        self.news.set()

    async def far(self, key: RegionKey) -> FarRegion:
        """See FarRegions."""
        while self.known is None:
            self.news.clear()
            await self.news.wait()
        return self.known

    def stale(self, far: FarRegion) -> None:
        """See FarRegions."""
        if self.known is far:
            self.known = None

    async def reach(self, src: RemoteRegion, dst: MappedRegion) -> Mortal:
        """See port.Reaching."""
        if src.card != self.good:
            raise TransferFailed("nobody is there")
        return Mortal(src.card)

    async def get(self) -> Mortal:
        """The session of the pair."""
        session, name = await asyncio.wait_for(self.sessions.get(SRC, DST), WAIT_S)
        assert isinstance(session, Mortal)
        assert name == "far"
        return session

    async def card(self, region: MappedRegion) -> bytes:
        """See port.Reaching."""
        raise NotImplementedError

    async def forget(self, region: MappedRegion) -> None:
        """See port.Reaching."""

    async def open(self, src: MappedRegion, dst: MappedRegion) -> Mortal:
        """See port.Transport."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """See port.Transport."""


async def test_a_session_that_is_over_by_itself_is_closed_and_another_opened() -> None:
    """Found so when nothing was under way: nobody failed, so nobody sends another card, and the same one is good."""
    far = Far()
    first = await far.get()
    assert await far.get() is first
    first.over = True
    second = await far.get()
    await asyncio.wait_for(far.sessions.aclose(), WAIT_S)
    assert first.closed
    assert second is not first


async def test_the_end_of_a_session_under_an_operation_costs_the_card_too() -> None:
    """The next session waits for the card that comes then; it is not tried where nobody is any more."""
    far = Far()
    first = await far.get()
    far.sessions.failed((SRC, DST))
    assert await far.get() is first, "what failed was not the session"
    first.over, far.good = True, b"second"
    far.sessions.failed((SRC, DST))
    waiting = asyncio.create_task(far.get())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    far.send()
    assert (await asyncio.wait_for(waiting, WAIT_S)).card == b"second"
    await asyncio.wait_for(far.sessions.aclose(), WAIT_S)


async def test_a_card_that_leads_nowhere_is_given_up() -> None:
    """Whoever wanted it fails; the next waits for the next card."""
    far = Far()
    far.good = b"second"
    with pytest.raises(TransferFailed, match="nobody is there"):
        await far.get()
    assert far.known is None
    far.send()
    assert (await far.get()).card == b"second"
    await asyncio.wait_for(far.sessions.aclose(), WAIT_S)


async def test_nothing_is_opened_when_all_was_closed() -> None:
    """It would wait for a card that nobody sends any more, and kvd for it."""
    far = Far()
    await asyncio.wait_for(far.sessions.aclose(), WAIT_S)
    with pytest.raises(TransferFailed, match="stops"):
        await far.get()
