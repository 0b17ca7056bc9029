"""Carries the core's operations out: plans, sessions and copies; each ends exactly once.

An operation of many pieces is copied slice by slice, each planned in a thread while the one before is copied: two of
them are in memory, the event loop goes on, and a cancelled operation ends with its present slice.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol

import structlog

from pdserve.kvd.effects import Post
from pdserve.kvd.plan import Planner, Runs
from pdserve.kvd.registry import Registry
from pdserve.kvd.reshard import match
from pdserve.kvd.sessions import Pair, Sessions
from pdserve.kvd.transport.port import Copy, FarSession, Moved, Session
from pdserve.rpc.errors import PdserveError, StaleEpoch, TransferFailed
from pdserve.runtime.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

_PLANNERS_KEPT: Final = 1024
"""Of pairs of regions. Those of ended engines are among them: an engine's id never means another one."""


class Ended(Protocol):
    """Told of an operation's end; `error` empty: every byte is in place."""

    def __call__(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        """Never raises. What carried it is in `moved`."""
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
        """Cancelled: nothing more of them is to begin."""
        self._waiting: dict[int, asyncio.Task[None]] = {}
        """Those that wait for their session to open."""
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, post: Post) -> None:
        """Begins an operation."""
        self._pairs[post.op_id] = (post.src, post.dst)
        task = asyncio.create_task(self._copy(post))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, op_id: int) -> None:
        """Asks an operation to end early."""
        if op_id not in self._pairs:
            return
        if op_id in self._copies:
            self._copies[op_id].cancel()
        elif op_id in self._waiting and op_id not in self._unwanted:
            self._waiting[op_id].cancel()  # a peer that does not answer must not keep it until its fence
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
            found = await self._session(post)
            if found is None:
                error = "cancelled"
            else:
                session, transport = found
                moved = await self._move(post, session)
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

    async def _session(self, post: Post) -> tuple[Session, str] | None:
        """The session and its transport's name; None where the operation was cancelled first, which leaves the session
        alone: others may wait for it."""
        if post.op_id in self._unwanted:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._waiting[post.op_id] = task
        try:
            return await self._sessions.get(post.src, post.dst)
        except asyncio.CancelledError:
            if post.op_id not in self._unwanted:
                raise
            task.uncancel()
            return None
        finally:
            del self._waiting[post.op_id]

    async def _move(self, post: Post, session: Session) -> Moved:
        if post.op_id in self._unwanted:
            return Moved(0, 0, cancelled=True)
        planned = self._planned(post)
        if isinstance(planned, Runs):
            return await self._begin(post.op_id, session, planned).wait()
        return await self._move_slices(post, session, planned)

    def _planned(self, post: Post) -> Runs | Iterator[Runs]:
        """What to copy: as a whole, or in slices, of which none is made yet."""
        try:
            planner = self._planner((post.src, post.dst))
            quick = planner.quick(len(post.src_blocks), len(post.layers))
            plan = planner.plan if quick else planner.slices
            return plan(post.layers, post.src_blocks, post.dst_blocks, post.first)
        except ValueError as error:
            raise TransferFailed(str(error)) from error

    async def _move_slices(self, post: Post, session: Session, slices: Iterator[Runs]) -> Moved:
        """Raises TransferFailed as one copy would; what had moved by then is not told."""
        moved = Moved(0, 0)
        runs = await _next(slices)
        while runs is not None:
            if isinstance(session, FarSession) and session.over:  # it lets copies end, and this one begins anew
                found = await self._session(post)
                session = session if found is None else found[0]
            if post.op_id in self._unwanted:
                return replace(moved, cancelled=True)
            copy = self._begin(post.op_id, session, runs)
            planning = asyncio.create_task(_next(slices))
            try:
                part = await copy.wait()
            finally:
                runs = await planning  # soon there, and nobody else would wait for it
            moved = Moved(moved.nbytes + part.nbytes, moved.ns + part.ns, part.cancelled, part.lanes or moved.lanes)
            if part.cancelled:
                break
        return moved

    def _begin(self, op_id: int, session: Session, runs: Runs) -> Copy:
        copy = self._copies[op_id] = session.start(runs)
        return copy

    def _planner(self, pair: Pair) -> Planner:
        known = self._planners.get(pair)
        if known is not None:
            return known
        engines = []
        for key in pair:
            entry = self._registry.get(key.engine_id)
            if entry is None or not entry.mapped or key.rank not in entry.regions:
                raise StaleEpoch("the memory of an engine that has ended")
            engines.append(entry.layouts)
        if len(self._planners) >= _PLANNERS_KEPT:
            self._planners.clear()
        (source, target), (src, dst) = engines, pair
        share = match(source, target).share(src.rank, dst.rank)
        planner = self._planners[pair] = Planner(source[src.rank], target[dst.rank], share)
        return planner


async def _next(slices: Iterator[Runs]) -> Runs | None:
    """Planned in a thread. Not the thread's result: an executor's thread may hold that for longer than it is wanted."""
    made: list[Runs | None] = []
    await asyncio.to_thread(lambda: made.append(next(slices, None)))
    return made.pop()
