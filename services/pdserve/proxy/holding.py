"""Requests that no engine can serve at this moment: held until one can, instead of refused.

An engine that is replaced is gone before the next one is there, and engines find a new proxy only with their next
beat. What waits here waits for engines, not for their credits: it holds nothing, and as soon as a set of engines could
serve it, it goes on as if it had just come. Bounded in number and in time; beyond either it is refused. The bound in
time is the request's: where engines come and go again, it waits several times, and all of them count. The time comes as
an argument, and so does what could serve.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.proxy.waiting import comes, nobody
from pdserve.rpc.errors import DeadlinePassed, Draining, NoEngines, PdserveError

T = TypeVar("T")


@dataclass(slots=True)
class Waited:
    """Of one request, carried along with it: how long it has been held so far."""

    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Held:
    possible: Callable[[], Any]
    why: NoEngines
    """What was missing when it was asked last."""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Holding:
    """Who waits for an engine. Call `look` when the set of engines may have changed."""

    def __init__(self, now: Callable[[], float], *, length: int, timeout: float) -> None:
        """`now`: monotonic seconds; `length`: most that wait; `timeout`: seconds that one waits, all its waits
        together, 0: none waits."""
        self._now = now
        self._length = length
        self._timeout = timeout
        self._held: list[_Held] = []
        self._stopped = ""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._held)

    def check(self, possible: Callable[[], object], waited: Waited) -> None:
        """Raises what `until` would raise at once: before more is spent on a request."""
        self._at_once(possible, waited)

    async def until(
        self, possible: Callable[[], T], deadline: float, waited: Waited, waits: Callable[[], None] = nobody
    ) -> T:
        """What `possible` gives as soon as it does not raise NoEngines. It neither blocks nor changes anything;
        `deadline` is the request's, in monotonic seconds, and so is `waited`, to which this wait is added; `waits` is
        told where it is not possible at once.

        Raises:
            NoEngines: what was missing all the time, or is missing where nobody waits, as many wait as may, or the
                request has waited as long as one may.
            DeadlinePassed: the request's deadline came first.
            Draining: the proxy takes nothing any more.
            PdserveError: whatever else `possible` raises.
        """
        found = self._at_once(possible, waited)
        if not isinstance(found, NoEngines):
            return found
        held = _Held(possible, found)
        self._held.append(held)
        waits()
        began, before = self._now(), waited.seconds
        left, patience = deadline - began, self._timeout - before
        try:
            if await comes(held.done, min(left, patience)):
                answer: T = held.done.result()
                return answer
            if left <= patience:
                raise DeadlinePassed("the request's deadline passed while it waited for an engine")
            raise self._too_long(held.why, before)
        finally:
            waited.seconds = before + self._now() - began
            if held in self._held:
                self._held.remove(held)

    def look(self) -> None:
        """Lets go who can be served now, in the order in which they came."""
        for held in tuple(self._held):
            if held.done.done():  # timed out or cancelled, and about to leave
                continue
            try:
                found = held.possible()
            except NoEngines as error:
                held.why = error
                continue
            except PdserveError as error:
                held.done.set_exception(error)
            else:
                held.done.set_result(found)
            self._held.remove(held)

    def stop(self, why: str) -> None:
        """Ends what waits, and all that comes, with DRAINING. Safe twice."""
        self._stopped = why
        for held in self._held:
            if not held.done.done():
                held.done.set_exception(Draining(why))
        self._held.clear()

    def _at_once(self, possible: Callable[[], T], waited: Waited) -> T | NoEngines:
        """What `possible` gives, or why it has to wait; raises where it may not."""
        if self._stopped:
            raise Draining(self._stopped)
        try:
            return possible()
        except NoEngines as error:
            if not self._timeout:
                raise
            if waited.seconds >= self._timeout:
                raise self._too_long(error, waited.seconds) from None
            if len(self._held) >= self._length:
                said = f"{error.message}, and {self._length} requests wait for one already"
                raise NoEngines(said, **error.metadata, held=str(self._length)) from None
            return error

    def _too_long(self, why: NoEngines, before: float) -> NoEngines:
        """`before`: seconds that the request has waited in earlier waits."""
        together = ", its earlier waits for engines included" if before else ""
        return NoEngines(f"{why.message}; none came within {self._timeout:g} s{together}", **why.metadata)
