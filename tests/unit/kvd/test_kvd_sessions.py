"""Sessions one by one; any order of events is the machine's, beside this."""

import asyncio

import pytest
from structlog.testing import capture_logs

from pdserve.kvd.plan import Runs
from pdserve.kvd.sessions import Sessions
from pdserve.kvd.transport.port import Capabilities, Copy, MappedRegion
from pdserve.kvd.types import MemoryKind, RegionKey

SRC, DST = RegionKey("P", 0), RegionKey("D", 0)


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
