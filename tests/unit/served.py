"""An engine's service over a real loopback server, and how its calls end.

Fake: the engine and kvd, which say what each test tells them to.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc
import pytest

from pdserve.engine.hosting.peers import Peers
from pdserve.engine.hosting.testing import INFO, ScriptedEngine, ScriptedHandoffs
from pdserve.rpc import errors
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.status import to_error
from pdserve.runtime.calls import Calls
from pdserve.runtime.server import Server
from pdserve.runtime.signing import Signer

SIGNER = Signer(b"the key of this cluster")
TID = bytes(range(16))
OTHER = bytes(16)


class Served:
    """What both services are tested with; each adds its servicer to `server` before it is served."""

    def __init__(self, name: str) -> None:
        """`name`: the service's, in full."""
        self.engine = ScriptedEngine()
        self.handoffs = ScriptedHandoffs()
        self.calls = Calls()
        self.peers = Peers(INFO, "unix:/run/kvd.sock", SIGNER)
        self.server = Server([name])
        self.channel = aio_channel(f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Serves; at the end nothing is held."""
        await self.server.start()
        yield self
        await self.channel.close()
        await self.server.stop()
        await self.calls.aclose()
        await self.idle()

    async def idle(self) -> None:
        """Waits until no work is left, and checks that nothing is held."""
        await asyncio.wait_for(self.calls.idle(), 5)
        assert all(run.ended.is_set() for run in self.engine.runs)
        assert all(watch.closed for watch in self.handoffs.watches.values())


async def rest(call: Any) -> None:
    """Reads a call to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def refused(call: Any) -> errors.PdserveError:
    """The typed error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(call)
    return to_error(raised.value)
