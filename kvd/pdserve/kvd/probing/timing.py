"""Opens a session, measures it and closes it: bounded, whatever the transport does."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from pdserve.kvd.probing.measuring import Landed, Measuring
from pdserve.kvd.probing.slot import whole
from pdserve.kvd.probing.values import Measured
from pdserve.kvd.transport.port import Session
from pdserve.rpc.errors import PdserveError

_EACH_S: Final = 5.0
"""Longest time for the copies of one transport. That of opening it, which may start its library's process and takes
seconds then, is bounded by the survey's."""


class Timing:
    """`now`: monotonic seconds. `meanwhile` is awaited while a session is open that was measured."""

    def __init__(self, now: Callable[[], float], meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._now = now
        self._meanwhile = meanwhile

    def left(self, deadline: float) -> float:
        """Seconds; not below 0."""
        return max(0.0, deadline - self._now())

    async def timed(
        self, opening: Coroutine[Any, Any, Session], size: int, landed: Landed, deadline: float
    ) -> Measured:
        """What fails is in the answer. `size`: bytes of scratch memory at either end."""
        try:
            async with asyncio.timeout(self.left(deadline)):
                session = await opening
        except TimeoutError:
            return Measured(error="it was not open in time")
        except PdserveError as error:
            return Measured(error=error.message)
        try:
            until = min(deadline, self._now() + _EACH_S)
            measured = await Measuring(session, size, landed, random.getrandbits(32), self._now, until).measure()
            await self._meanwhile()
            return measured
        finally:
            await whole(session.close())  # its copies write to what is unmapped next
