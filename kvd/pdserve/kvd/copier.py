"""Carries the core's operations out: plans, sessions and copies; each ends exactly once."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import structlog

from pdserve.kvd.effects import Post
from pdserve.kvd.plan import Planner, Runs
from pdserve.kvd.registry import Registry
from pdserve.kvd.sessions import Pair, Sessions
from pdserve.kvd.transport.port import Copy, Moved
from pdserve.rpc.errors import PdserveError, StaleEpoch, TransferFailed
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

_PLANNERS_KEPT: Final = 1024
"""Of pairs of regions. Those of ended engines are among them: an engine's id never means another one."""


class Ended(Protocol):
    """Told of an operation's end; `error` empty: every byte is in place."""

    def __call__(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        """Never raises."""
        ...


class Copier:
    """See the module. `defect` is told of errors that only a defect of kvd explains."""

    def __init__(
        self, registry: Registry, sessions: Sessions, ended: Ended, defect: Callable[[BaseException], None]
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._ended = ended
        self._defect = defect
        self._planners: dict[Pair, Planner] = {}
        self._copies: dict[int, Copy] = {}
        self._pairs: dict[int, Pair] = {}
        self._unwanted: set[int] = set()
        """Cancelled before their copy had begun."""
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, post: Post) -> None:
        """Begins an operation."""
        self._pairs[post.op_id] = (post.src, post.dst)
        task = asyncio.create_task(self._copy(post))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, op_id: int) -> None:
        """Asks an operation to end early."""
        if op_id in self._copies:
            self._copies[op_id].cancel()
        elif op_id in self._pairs:
            self._unwanted.add(op_id)

    def pairs(self, op_ids: Iterable[int]) -> set[Pair]:
        """The sessions that these operations use."""
        return {self._pairs[op_id] for op_id in op_ids if op_id in self._pairs}

    async def aclose(self) -> None:
        """Waits for every operation's end; the sessions are closed before."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _copy(self, post: Post) -> None:
        moved, transport, error = Moved(0, 0), "", ""
        try:
            await failpoint(Point.KVD_POST)
            session, transport = await self._sessions.get(post.src, post.dst)
            if post.op_id in self._unwanted:
                error = "cancelled"
            else:
                copy = session.start(self._plan(post))
                self._copies[post.op_id] = copy
                moved = await copy.wait()
                await failpoint(Point.KVD_COPIED)
                error = "cancelled" if moved.cancelled else ""
        except PdserveError as failure:
            log.warning("copy_failed", transfer_id=post.transfer_id.hex(), error=failure.message)
            self._sessions.failed((post.src, post.dst))
            error = failure.message
        except Exception as failure:  # noqa: BLE001  # the core must hear of the end; it is logged
            self._defect(failure)
            error = f"{type(failure).__name__}: {failure}"
        self._copies.pop(post.op_id, None)
        self._pairs.pop(post.op_id, None)
        self._unwanted.discard(post.op_id)
        self._ended(post.op_id, moved, transport, error)

    def _plan(self, post: Post) -> Runs:
        try:
            return self._planner((post.src, post.dst)).plan(post.layers, post.src_blocks, post.dst_blocks)
        except ValueError as error:
            raise TransferFailed(str(error)) from error

    def _planner(self, pair: Pair) -> Planner:
        known = self._planners.get(pair)
        if known is not None:
            return known
        layouts = []
        for key in pair:
            entry = self._registry.get(key.engine_id)
            if entry is None or key.rank not in entry.regions:
                raise StaleEpoch("the memory of an engine that has ended")
            layouts.append(entry.regions[key.rank].layout)
        if len(self._planners) >= _PLANNERS_KEPT:
            self._planners.clear()
        planner = self._planners[pair] = Planner(*layouts)
        return planner
