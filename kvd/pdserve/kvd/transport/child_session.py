"""Sessions and copies whose work is done in a process (`Child`): what is kvd's part of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.port import MappedRegion, Moved, RemoteRegion
from pdserve.kvd.transport.shm import check_runs
from pdserve.rpc.errors import TransferFailed

_CLOSE_S: Final = 1.0
"""What the copies of a session that closes have to come to an end, before their process is ended."""


class ChildSession:
    """See port.FarSession."""

    def __init__(
        self,
        process: Child,
        peer: tuple[str, int],
        regions: tuple[RemoteRegion, MappedRegion],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        """`peer`: what is read, as the process names it, and what offsets in it are counted from. `leave` is awaited at
        the end."""
        self._process = process
        self._peer = peer
        self._src, self._dst = regions
        self._leave = leave
        self._copies: set[ChildCopy] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """See port.FarSession."""
        return self._closing is not None or not self._process.running

    def start(self, runs: Runs) -> "ChildCopy":
        """See port.Session."""
        if self._closing is not None:
            raise TransferFailed("the session is closed")
        check_runs(runs, self._src, self._dst)
        if not runs.total:
            future: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()
            future.set_result(Moved(0, 0))
            return ChildCopy(self._process, 0, future)
        begun = self._process.copy(str(self._dst.key), *self._peer, runs)
        copy = ChildCopy(self._process, *begun)
        self._copies.add(copy)
        copy.future.add_done_callback(lambda _: self._copies.discard(copy))
        return copy

    async def close(self) -> None:
        """See port.Session."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self._process.retiring:  # it ends soon, and until then its copies have their chance
            for copy in self._copies:
                copy.cancel()
        ends = [copy.future for copy in self._copies]
        if ends:
            _, left = await asyncio.wait(ends, timeout=_CLOSE_S)
            if left:
                self._process.give_up(f"copies of a closed session had not ended after {_CLOSE_S:g} s")
                await asyncio.wait(left)
        await self._leave()


class ChildCopy:
    """See port.Copy."""

    def __init__(self, process: Child, copy_id: int, future: asyncio.Future[Moved]) -> None:
        self._process = process
        self._copy_id = copy_id
        self.future = future

    def cancel(self) -> None:
        """See port.Copy."""
        self._process.cancel(self._copy_id)

    async def wait(self) -> Moved:
        """See port.Copy."""
        # Shielded: whoever stops waiting does not stop the copy.
        return await asyncio.shield(self.future)
