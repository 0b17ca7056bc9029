"""Ctrl-C and its kin: the first asks for a drain, the second for haste."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


class Stop:
    """Takes SIGINT, SIGTERM and SIGHUP of this process; made inside a running loop."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        """`hurry` is called from the second signal on."""
        self._asked = asyncio.Event()
        self._hurry = hurry
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._received)

    async def unless(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` to its end, or cancels it at a signal: False then. What it raises comes out."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _received(self) -> None:
        if self._asked.is_set():
            self._hurry()
        self._asked.set()
