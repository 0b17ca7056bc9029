"""Sessions and copies in any order, over a transport whose opens, copies and closes the machine ends by hand.

Real: `Sessions` and `Copier`. By hand: the transport, and the engines that come and go. The machine plays
the node: it posts operations, cancels them, tears sessions down under them, and unmaps an engine's memory
when the sessions say that they are closed.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.kvd.copier import Copier
from pdserve.kvd.effects import Post
from pdserve.kvd.plan import Runs
from pdserve.kvd.registry import Region, Registry
from pdserve.kvd.sessions import Pair, Sessions
from pdserve.kvd.testing import plain_layout
from pdserve.kvd.transport.port import Capabilities, MappedRegion, Moved
from pdserve.kvd.types import PROTOCOL, MemoryKind, RegionKey
from pdserve.rpc.errors import StaleEpoch, TransferFailed

ENGINES = 3
"""That live at once."""
BLOCKS, BLOCK_BYTES = 1024, 64
"""Operation n fills block n, so that the transport knows whose a copy is."""
TURNS = 15
"""Of the loop, in which everything that can go on has gone on."""


@dataclass(eq=False)
class HandCopy:
    """A copy that ends when it is told to."""

    op_id: int
    asked: bool = False
    """To end early."""
    end: asyncio.Future[Moved] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def cancel(self) -> None:
        """See port.Copy."""
        self.asked = True

    async def wait(self) -> Moved:
        """See port.Copy."""
        return await asyncio.shield(self.end)


@dataclass(eq=False)
class HandSession:
    """Closes in two steps: its copies end at once, `close` returns when it is told to."""

    pair: Pair
    closing: asyncio.Future[None] | None = None
    closed: bool = False
    copies: list[HandCopy] = field(default_factory=list)

    def start(self, runs: Runs) -> HandCopy:
        """See port.Session."""
        if self.closing is not None:
            raise TransferFailed("the session is closed")
        copy = HandCopy(int(runs.dst[0]) // BLOCK_BYTES)
        self.copies.append(copy)
        return copy

    async def close(self) -> None:
        """See port.Session."""
        assert self.closing is None, "closed twice"
        self.closing = asyncio.get_running_loop().create_future()
        for copy in self.copies:
            if not copy.end.done():
                copy.end.set_exception(TransferFailed("the session was closed under the copy"))
                copy.end.exception()
        await self.closing
        self.closed = True


class HandTransport:
    """See port.Transport."""

    capabilities = Capabilities("hand", frozenset(MemoryKind), same_node=True)

    def __init__(self) -> None:
        self.opening: list[tuple[Pair, asyncio.Future[HandSession]]] = []
        self.sessions: list[HandSession] = []

    async def open(self, src: MappedRegion, dst: MappedRegion) -> HandSession:
        """Waits for the machine; cancelled, it leaves nothing open."""
        future: asyncio.Future[HandSession] = asyncio.get_running_loop().create_future()
        pending = (src.key, dst.key), future
        self.opening.append(pending)
        try:
            session = await future
        finally:
            self.opening.remove(pending)
        self.sessions.append(session)
        return session

    async def aclose(self) -> None:
        """See port.Transport."""


class Machine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.transport = HandTransport()
        self.registry = Registry()
        self.mapped: dict[RegionKey, MappedRegion] = {}
        self.sessions = Sessions((self.transport,), self.mapped.get)
        self.defects: list[BaseException] = []
        self.copier = Copier(self.registry, self.sessions, self._ended, self.defects.append)
        self.engines: list[str] = []
        self.gone: set[str] = set()
        """Whose sessions `close_engine` has said to be closed."""
        self.posted: dict[int, Pair] = {}
        self.ends: dict[int, str] = {}
        self.unwanted: set[int] = set()
        """Cancelled before their copy began."""
        self.callers: list[asyncio.Task[object]] = []
        """Of `get`, beside the copier."""
        self.closers: list[asyncio.Task[None]] = []
        self.names = 0
        for _ in range(ENGINES):
            self._start_engine()

    def _ended(self, op_id: int, moved: Moved, transport: str, error: str) -> None:
        if op_id not in self.posted or op_id in self.ends:  # raised here, it would be lost in the copier's task
            self.defects.append(
                AssertionError(f"operation {op_id} ended again: {error!r} after {self.ends.get(op_id)!r}")
            )
        self.ends[op_id] = error

    def _start_engine(self) -> None:
        self.names += 1
        name, size, layout = f"E{self.names}", BLOCKS * BLOCK_BYTES, plain_layout(BLOCKS, 1, BLOCK_BYTES)
        self.registry.hello(name, 1, PROTOCOL, {})
        self.registry.add_region(name, 0, Region(size, MemoryKind.HOST, layout))
        self.mapped[RegionKey(name, 0)] = MappedRegion(RegionKey(name, 0), MemoryKind.HOST, size, 0)
        self.engines.append(name)

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        self._check_copies()
        self._check_pairs()

    def _check_copies(self) -> None:
        """An operation has one copy, or none where it never began, and has ended just if that is terminal; well
        just if all was copied."""
        copies = {copy.op_id: copy for copy in self._copies()}
        assert len(copies) == len(self._copies()), "an operation was copied twice"
        assert not self.unwanted & set(copies), "begun after it was cancelled"
        for op_id, copy in copies.items():
            assert copy.end.done() == (op_id in self.ends), op_id
        for op_id, error in self.ends.items():
            ended = copies[op_id].end if op_id in copies else None
            good = ended is not None and ended.exception() is None and not ended.result().cancelled
            assert good == (not error), (op_id, error)

    def _check_pairs(self) -> None:
        """Of each pair of epochs one session at most is open or being opened, besides those that close."""
        assert len(set(self._live())) == len(self._live()), self._live()

    def _live(self) -> list[Pair]:
        live = [s.pair for s in self.transport.sessions if s.closing is None]
        return live + [pair for pair, _ in self.transport.opening]

    def _pair(self, parts: tuple[int, int]) -> Pair:
        return RegionKey(self.engines[parts[0]], 0), RegionKey(self.engines[parts[1]], 0)

    # -- the node ---------------------------------------------------------------------------

    @initialize()
    def first(self) -> None:
        """There is always a session that is being opened."""
        self.post((0, 1), 2, True)

    @rule(
        parts=st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 0), (2, 1)]),
        count=st.integers(1, 3),
        settle=st.booleans(),
    )
    def post(self, parts: tuple[int, int], count: int, settle: bool) -> None:
        """Operations between two engines; `settle` False: what comes next comes in the same turn of the loop."""
        pair = self._pair(parts)

        async def begin() -> None:
            for _ in range(count):
                op_id = len(self.posted) + 1
                self.posted[op_id] = pair
                self.copier.post(Post(op_id, bytes(16), *pair, (0,), (0,), (op_id,)))

        self.loop.run_until_complete(begin())
        if settle:
            self._settle()
            assert pair in self._live(), "a failure, or a session that is closed, was kept"

    @precondition(lambda self: len(self.posted) > len(self.ends))
    @rule(data=st.data(), settle=st.booleans())
    def cancel(self, data: st.DataObject, settle: bool) -> None:
        """An operation is asked to end early, begun or not."""
        op_id = data.draw(st.sampled_from(sorted(set(self.posted) - set(self.ends))))
        self.copier.cancel(op_id)
        if op_id not in {copy.op_id for copy in self._copies()}:
            self.unwanted.add(op_id)
        if settle:
            self._settle()

    @rule(parts=st.sampled_from([(0, 1), (0, 2)]), settle=st.booleans())
    def ask(self, parts: tuple[int, int], settle: bool) -> None:
        """Somebody else wants the session, too."""
        pair = self._pair(parts)
        self.callers.append(self.loop.create_task(self.sessions.get(*pair)))
        if settle:
            self._settle()
            assert pair in self._live(), "a failure, or a session that is closed, was kept"

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), source=st.booleans())
    def ask_too_late(self, data: st.DataObject, source: bool) -> None:
        """Somebody wants one of an epoch that is over: refused at once."""
        pair = RegionKey(data.draw(st.sampled_from(sorted(self.gone))), 0), RegionKey(self.engines[0], 0)
        caller = self.loop.create_task(self.sessions.get(*(pair if source else pair[::-1])))
        self._settle()
        assert caller.done()
        assert isinstance(caller.exception(), StaleEpoch)

    @precondition(lambda self: self._waiting())
    @rule(data=st.data(), opens=st.booleans(), turns=st.integers(0, 3))
    def leave(self, data: st.DataObject, opens: bool, turns: int) -> None:
        """Who waits for a session goes away, perhaps just as it opens: it stays, for whoever comes next."""
        caller = data.draw(st.sampled_from(self._waiting()))
        if opens and self.transport.opening:
            self._open(data.draw(st.integers(0, len(self.transport.opening) - 1)), "")

        async def go() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            caller.cancel()

        self.loop.run_until_complete(go())
        self._settle()

    @precondition(lambda self: len(self.posted) > len(self.ends))
    @rule(data=st.data(), settle=st.booleans())
    def tear_down(self, data: st.DataObject, settle: bool) -> None:
        """A fence is overdue: the sessions of some operations are closed, whatever state they are in."""
        some = data.draw(st.sets(st.sampled_from(sorted(set(self.posted) - set(self.ends))), min_size=1))
        self.closers += [self.loop.create_task(self.sessions.close(pair)) for pair in self.copier.pairs(some)]
        if settle:
            self._settle()

    @precondition(lambda self: len(self.gone) < 4)
    @rule(at=st.integers(0, ENGINES - 1), settle=st.booleans())
    def new_epoch(self, at: int, settle: bool) -> None:
        """An engine ends, with operations or without, and another comes in its place."""
        name = self.engines.pop(at)
        self.registry.end(name)
        del self.mapped[RegionKey(name, 0)]
        self.closers.append(self.loop.create_task(self._unmap(name)))
        self._start_engine()
        self.engines.insert(at, self.engines.pop())
        if settle:
            self._settle()

    async def _unmap(self, name: str) -> None:
        await self.sessions.close_engine(name)
        self.registry.forget(name)
        self.gone.add(name)

    # -- below ------------------------------------------------------------------------------

    @precondition(lambda self: self.transport.opening)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def opens(self, data: st.DataObject, fails: bool) -> None:
        """A session is there, or cannot be made."""
        at = data.draw(st.integers(0, len(self.transport.opening) - 1))
        self._open(at, "out of reach" if fails else "")
        self._settle()

    def _open(self, at: int, error: str) -> None:
        pair, future = self.transport.opening[at]
        if not future.done():
            if error:
                future.set_exception(TransferFailed(error))
            else:
                future.set_result(HandSession(pair))

    @precondition(lambda self: self._flying())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def copy_ends(self, data: st.DataObject, fails: bool) -> None:
        """Any copy, in any order, well, badly or early."""
        self._finish(data.draw(st.sampled_from(self._flying())), fails)

    def _finish(self, copy: HandCopy, fails: bool) -> None:
        if fails:
            copy.end.set_exception(TransferFailed("the link failed"))
        else:
            copy.end.set_result(Moved(0 if copy.asked else 64, 1, cancelled=copy.asked))
        self._settle()

    @precondition(lambda self: self._ending())
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        """A session's close returns."""
        self._close(data.draw(st.sampled_from(self._ending())))

    def _close(self, session: HandSession) -> None:
        assert session.closing is not None
        session.closing.set_result(None)
        self._settle()

    def _waiting(self) -> list[asyncio.Task[object]]:
        return [caller for caller in self.callers if not caller.done()]

    def _copies(self) -> list[HandCopy]:
        return [copy for session in self.transport.sessions for copy in session.copies]

    def _flying(self) -> list[HandCopy]:
        return [copy for copy in self._copies() if not copy.end.done()]

    def _ending(self) -> list[HandSession]:
        return [s for s in self.transport.sessions if s.closing is not None and not s.closed and not s.closing.done()]

    # -- the model --------------------------------------------------------------------------

    @invariant()
    def none_survives_its_epoch(self) -> None:
        """Once an engine's sessions are said to be closed, none of it is open, and no copy works on its memory."""
        for session in self.transport.sessions:
            if self.gone & {key.engine_id for key in session.pair}:
                assert session.closed, session
                assert all(copy.end.done() for copy in session.copies)
        assert not [p for p, _ in self.transport.opening if self.gone & {key.engine_id for key in p}]

    @invariant()
    def no_defect(self) -> None:
        """Nothing but a typed error ends an operation, and a closer's or caller's failure is one."""
        assert not self.defects, self.defects
        for task in self.callers:
            if task.done() and not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), TransferFailed | StaleEpoch)
        for closer in self.closers:
            if closer.done():
                closer.result()

    def teardown(self) -> None:
        """The node stops: with no help from a transport whose opens hang, all ends, each operation once."""
        with contextlib.closing(self.loop), self._no_task_left():
            stop = self.loop.create_task(self._stop())
            for _ in range(4 + 2 * len(self.transport.sessions)):
                self._settle()
                for session in self._ending():
                    self._close(session)
            assert stop.done(), "the sessions are not closed"
            stop.result()
            assert set(self.ends) == set(self.posted)
            assert all(closer.done() for closer in self.closers)
            assert all(caller.done() for caller in self.callers)
            assert all(session.closed for session in self.transport.sessions), "left open"
            assert not self.transport.opening
            assert not self.copier.pairs(self.posted)
            self.no_defect()
        super().teardown()

    @contextlib.contextmanager
    def _no_task_left(self) -> Iterator[None]:
        """Ends what a failed run has left, so that its error is the only one that is shown."""
        try:
            yield
            assert not asyncio.all_tasks(self.loop)
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self._settle()

    async def _stop(self) -> None:
        await self.sessions.aclose()
        await self.copier.aclose()


TestSessionsMachine = Machine.TestCase
TestSessionsMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
