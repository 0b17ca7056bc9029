"""What is armed in this process, what went by, and who waits at a pause."""

import asyncio
import collections
import os
import signal
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from pdserve.rpc.errors import BY_REASON, ConfigError
from pdserve.runtime.failpoints.points import Kind, Point
from pdserve.runtime.failpoints.terms import Action, Program, Term, parse

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Count:
    """What has happened at one point."""

    hits: int
    """Times that somebody came by while it was armed."""
    fired: int
    """Times that something was done."""
    waiting: int
    """How many wait at a pause now."""


class _Waiter:
    """Somebody at a pause, in a task or in a thread."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None

    def release(self) -> None:
        """Lets it go on; from any thread."""
        self._released.set()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def wait_now(self, seconds: float) -> bool:
        return self._released.wait(seconds)

    async def wait(self, seconds: float) -> bool:
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()
        if self._released.is_set():
            return True
        done, _ = await asyncio.wait({self._future}, timeout=seconds)
        return bool(done)

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Failpoints:
    """See the module. Every method may be called from any thread. Where nothing is armed a point
    costs one attribute."""

    def __init__(self) -> None:
        self.armed = False
        """Whether any point is."""
        self._lock = threading.Condition()
        self._programs: dict[Point, Program] = {}
        self._hits: collections.Counter[Point] = collections.Counter()
        self._fired: collections.Counter[Point] = collections.Counter()
        self._waiters: dict[Point, list[_Waiter]] = {}
        self._late: dict[tuple[Point, Hashable], list[object]] = {}

    # -- arming -----------------------------------------------------------------------------

    def arm(self, point: Point, terms: str) -> None:
        """From now on these terms act at the point, counted from zero.

        Raises:
            ConfigError: no such terms, or they cannot act there.
        """
        parsed = parse(terms)
        for term in parsed:
            if term.action not in point.kind.value:
                raise ConfigError(f"failpoint {point.value} cannot {term.action.value}")
        with self._lock:
            self._programs[point] = Program(parsed)
            self._hits[point] = self._fired[point] = 0
            self._forget_late(point)
            self.armed = True
        log.warning("failpoint_armed", point=point.value, terms=terms)

    def disarm(self, point: Point) -> None:
        """Nothing happens there any more; who waits there goes on. Counts stay. A late message that no other has
        followed is lost: it must not turn up among those of another time."""
        with self._lock:
            self._programs.pop(point, None)
            self._forget_late(point)
            self.armed = bool(self._programs)
        self.release(point)

    def clear(self) -> None:
        """Disarms all and forgets what was counted."""
        for point in Point:
            self.disarm(point)
        with self._lock:
            self._hits.clear()
            self._fired.clear()

    def release(self, point: Point) -> int:
        """Lets everybody go on who waits there; how many."""
        with self._lock:
            waiters = self._waiters.pop(point, [])
        for waiter in waiters:
            waiter.release()
        return len(waiters)

    # -- looking ----------------------------------------------------------------------------

    def count(self, point: Point) -> Count:
        """What has happened at a point since it was armed."""
        with self._lock:
            return self._count(point)

    def await_count(self, point: Point, seconds: float, *, fired: int = 0, waiting: int = 0) -> Count:
        """Blocks until the point has fired so often and so many wait there, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: self._enough(point, fired, waiting), seconds)
            return self._count(point)

    def _enough(self, point: Point, fired: int, waiting: int) -> bool:
        count = self._count(point)
        return count.fired >= fired and count.waiting >= waiting

    def _count(self, point: Point) -> Count:
        return Count(self._hits[point], self._fired[point], len(self._waiters.get(point, ())))

    # -- going by ---------------------------------------------------------------------------

    def value(self, point: Point) -> float:
        """The number that a point of kind VALUE says; 0 where it says nothing."""
        term = self._next(point)
        return term.number if term.action is Action.RETURN else 0.0

    async def go_by(self, point: Point) -> Action:
        """Does what the point's terms say, in a task.

        Raises:
            PdserveError: the terms say so.
        """
        term = self._next(point)
        if term.action is Action.DELAY:
            await asyncio.sleep(term.number / 1000)
        elif term.action is Action.PAUSE:
            waiter = self._wait(point)
            try:
                released = await waiter.wait(term.number)
            finally:
                self._waited(point, waiter)
            self._overdue(point, released=released)
        else:
            self._at_once(term)
        return term.action

    def go_by_now(self, point: Point) -> Action:
        """The same in a thread, or where a task cannot wait: its whole event loop waits then."""
        term = self._next(point)
        if term.action is Action.DELAY:
            time.sleep(term.number / 1000)
        elif term.action is Action.PAUSE:
            waiter = self._wait(point)
            try:
                released = waiter.wait_now(term.number)
            finally:
                self._waited(point, waiter)
            self._overdue(point, released=released)
        else:
            self._at_once(term)
        return term.action

    def passed(self, point: Point, item: T, action: Action, lane: Hashable = None) -> Sequence[T]:
        """What arrives of a message after what `go_by` has said: nothing, once, twice, or after
        the next one of its lane."""
        if action is Action.DROP:
            return ()
        if action is Action.LATE:
            with self._lock:
                self._late.setdefault((point, lane), []).append(item)
            return ()
        with self._lock:
            late: Iterable[T] = self._late.pop((point, lane), [])  # type: ignore[assignment]  # of this point, hence T
        return (item, item, *late) if action is Action.TWICE else (item, *late)

    def _next(self, point: Point) -> Term:
        with self._lock:
            program = self._programs.get(point)
            if program is None:
                return Term(Action.OFF)
            term = program.next()
            self._hits[point] += 1
            if term.action is not Action.OFF:
                self._fired[point] += 1
            self._lock.notify_all()
        if term.action is not Action.OFF and point.kind is not Kind.VALUE:
            log.warning("failpoint", point=point.value, action=term.action.value, argument=term.argument)
        return term

    def _at_once(self, term: Term) -> None:
        if term.action is Action.ERROR:
            raise BY_REASON[term.argument]("a failpoint says so")
        if term.action is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif term.action is Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _wait(self, point: Point) -> _Waiter:
        waiter = _Waiter()
        with self._lock:
            if point not in self._programs:  # disarmed since its term was taken: nobody would release it
                waiter.release()
                return waiter
            self._waiters.setdefault(point, []).append(waiter)
            self._lock.notify_all()
        return waiter

    def _waited(self, point: Point, waiter: _Waiter) -> None:
        with self._lock:
            waiters = self._waiters.get(point, [])
            if waiter in waiters:
                waiters.remove(waiter)
            self._lock.notify_all()

    def _forget_late(self, point: Point) -> None:
        for key in [key for key in self._late if key[0] is point]:
            del self._late[key]

    def _overdue(self, point: Point, *, released: bool) -> None:
        if not released:
            log.error("failpoint_never_released", point=point.value)
