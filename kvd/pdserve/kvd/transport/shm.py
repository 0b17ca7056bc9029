"""Copies between host memory of one node: kvd's own mappings, one copy thread off the event loop."""

import asyncio
import concurrent.futures
import time
from typing import Final

import numpy as np

from pdserve.kvd.plan import Runs
from pdserve.kvd.runs import leaves
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.mover import Stop
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved, RemoteRegion
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed

_AT_ONCE_BYTES: Final = 64 << 10
"""Copied on the loop: it takes less time (some 10 µs) than the way to the thread and back."""


def check_runs(runs: Runs, src: MappedRegion | RemoteRegion, dst: MappedRegion) -> None:
    """Raises TransferFailed where a run leaves its region."""
    if leaves(runs.src, runs.length, src.size) or leaves(runs.dst, runs.length, dst.size):
        raise TransferFailed(f"a copy from {src.key} to {dst.key} leaves its region")


class ShmTransport:
    """One node, host memory. One thread: a second one finds no more memory bandwidth."""

    capabilities: Final = Capabilities("shm", frozenset({MemoryKind.HOST}), same_node=True)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvd-copy")

    async def open(self, src: MappedRegion, dst: MappedRegion) -> "ShmSession":
        """See port.Transport."""
        return ShmSession(self._arena, self._thread, src, dst)

    async def aclose(self) -> None:
        """See port.Transport."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


class ShmSession:
    """See port.Session."""

    def __init__(
        self, arena: Arena, thread: concurrent.futures.ThreadPoolExecutor, src: MappedRegion, dst: MappedRegion
    ) -> None:
        self._arena = arena
        self._thread = thread
        self._src = src
        self._dst = dst
        self._copies: set[ShmCopy] = set()
        self._closed = False

    def start(self, runs: Runs) -> "ShmCopy":
        """See port.Session."""
        if self._closed:
            raise TransferFailed("the session is closed")
        check_runs(runs, self._src, self._dst)
        copy = ShmCopy(self._arena, runs, self._src.offset, self._dst.offset)
        loop = asyncio.get_running_loop()
        if not self._copies and runs.total <= _AT_ONCE_BYTES:
            copy.future = loop.create_future()
            copy.future.set_result(copy.run())
            return copy
        future = loop.run_in_executor(self._thread, copy.run)
        copy.future = future
        self._copies.add(copy)
        future.add_done_callback(lambda _: self._copies.discard(copy))
        return copy

    async def close(self) -> None:
        """See port.Session."""
        self._closed = True
        copies = list(self._copies)
        for copy in copies:
            copy.cancel()
        futures = [copy.future for copy in copies if copy.future is not None]
        if futures:
            await asyncio.wait(futures)


class ShmCopy:
    """See port.Copy. `run` is called in the copy thread."""

    def __init__(self, arena: Arena, runs: Runs, src_offset: int, dst_offset: int) -> None:
        self._arena = arena
        self._runs = runs
        self._src_offset = np.uint64(src_offset)
        self._dst_offset = np.uint64(dst_offset)
        self._total = runs.total
        self._stop = Stop()
        self.future: asyncio.Future[Moved] | None = None

    def cancel(self) -> None:
        """See port.Copy."""
        self._stop.set()

    async def wait(self) -> Moved:
        """See port.Copy."""
        assert self.future is not None
        # Shielded: whoever stops waiting does not stop the thread.
        return await asyncio.shield(self.future)

    def run(self) -> Moved:
        """Copies until all is done or it is cancelled."""
        began = time.monotonic_ns()
        runs = self._runs
        src, dst = runs.src + self._src_offset, runs.dst + self._dst_offset
        moved = self._arena.move(dst, src, runs.length, self._stop)
        return Moved(moved, time.monotonic_ns() - began, cancelled=moved < self._total)
