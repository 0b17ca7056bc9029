"""Measures one session: latency of a small block, and the rate of scattered copies over block sizes.

Over the port that hand-overs use, and not for longer than it is given: what would take longer is left out.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from pdserve.kvd.bench_shape import scattered
from pdserve.kvd.plan import Runs
from pdserve.kvd.probing.values import Measured, Speed
from pdserve.kvd.transport.port import Session
from pdserve.rpc.errors import TransferFailed

BLOCKS: Final = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
SMALL: Final = 4 << 10
"""The block whose latency is measured."""
_SMALL_COPIES: Final = 21
_COPIES: Final = 3
"""Of each block size."""
_LONGEST: Final = 0.25
"""Seconds that one copy should take at most: transfers wait behind it."""
_GROWTH: Final = 4
"""From one copy of the run-up to the next."""
_LONG_ENOUGH: Final = 0.02
"""Seconds after which a copy's rate says what the link does, not what the request costs."""

Landed = Callable[[Runs], Awaitable[bool]]
"""Whether these runs are in place. Raises TransferFailed where that cannot be known."""


class Measuring:
    """One measurement. `now`: monotonic seconds; it ends at `deadline` of them."""

    def __init__(
        self, session: Session, size: int, landed: Landed, seed: int, now: Callable[[], float], deadline: float
    ) -> None:
        """`size`: bytes of scratch memory at either end."""
        self._session = session
        self._size = size
        self._landed = landed
        self._random = np.random.default_rng(seed)
        self._now = now
        self._deadline = deadline
        self._lanes = ""

    async def measure(self) -> Measured:
        """All of it, or until the deadline. What fails is in the answer."""
        latency, speeds, error = 0.0, list[Speed](), ""
        try:
            latency = await self._latency()
            rate = await self._run_up()
            for block in BLOCKS:
                speed = await self._speed(block, rate)
                if speed is not None:
                    speeds.append(speed)
        except TransferFailed as failure:
            error = failure.message
        except TimeoutError:
            error = "there was no time left for the rest"
        return Measured(self._lanes, latency, tuple(speeds), error)

    async def _latency(self) -> float:
        await self._copy(SMALL, 1)  # the first one connects
        took: list[float] = []
        ends = self._now() + (self._deadline - self._now()) / 4
        while len(took) < _SMALL_COPIES and (not took or self._now() < ends):
            took.append(await self._copy(SMALL, 1))
        return statistics.median(took)

    async def _run_up(self) -> float:
        """The rate, of a copy that is long enough to tell; bytes a second."""
        count, most = 1, self._size // BLOCKS[0]
        while True:
            seconds = await self._copy(BLOCKS[0], count)
            if seconds >= _LONG_ENOUGH or count >= most:
                return count * BLOCKS[0] / seconds
            count = min(most, count * _GROWTH)

    async def _speed(self, block: int, rate: float) -> Speed | None:
        """The median of some copies; None where a single block would take too long."""
        count = blocks(block, rate, self._size)
        if not count:
            return None
        took = [await self._copy(block, count) for _ in range(_COPIES)]
        return Speed(block, count * block, statistics.median(took))

    async def _copy(self, block: int, count: int) -> float:
        runs = scattered(self._random, self._size, block, count * block)
        began = self._now()
        if began >= self._deadline:
            raise TimeoutError
        async with asyncio.timeout(self._deadline - began):
            moved = await self._session.start(runs).wait()
        seconds = self._now() - began
        self._lanes = moved.lanes or self._lanes
        if moved.cancelled or moved.nbytes != count * block or not await self._landed(runs):
            raise TransferFailed(f"of {count * block} bytes not all are what was sent")
        return max(seconds, 1e-9)


def blocks(block: int, rate: float, size: int) -> int:
    """How many blocks of a size make one copy at a rate in bytes a second: all that fit, as far as that does not take
    too long; 0 where one alone would."""
    return min(size // block, int(rate * _LONGEST) // block)
