"""Whether a device's memory can be registered: tried in two mori processes that are there for that alone, since they
abort where it cannot.

Up to a session, and without a copy: with it a device has taken the memory, on both sides.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from pdserve.kvd.transport.mori_process import MoriProcess, Parts
from pdserve.kvd.transport.once import end
from pdserve.kvd.types import DeviceMemory

_OWN_BYTES: Final = 2 << 20

Start = Callable[[], Coroutine[Any, Any, MoriProcess]]
"""A process that is ready."""


async def try_foreign(start: Start, memory: DeviceMemory) -> None:
    """A rank's memory, opened by its handles. Raises TransferFailed."""
    await _try(start, lambda process: process.register_device("tried", memory))


async def try_own(start: Start, bus_id: str) -> None:
    """Memory of the processes themselves, on this device. Raises TransferFailed."""
    await _try(start, lambda process: process.register_own("tried", bus_id, _OWN_BYTES))


async def _try(start: Start, register: Callable[[MoriProcess], Awaitable[Parts]]) -> None:
    starting = [asyncio.create_task(start()) for _ in range(2)]
    try:
        serving, reading = await asyncio.gather(*starting)
        parts = await register(serving)
        await register(reading)
        await reading.reach("tried", "tried", serving.card, parts)
    finally:
        for process in starting:
            await end(process)
