"""How long a test waits for what it expects."""

import asyncio
from collections.abc import Callable

WAIT_S = 20.0
"""Longest wait for anything that a test expects; the box may be busy."""


async def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Waits for what has no event of its own.

    Raises:
        AssertionError: not within `seconds`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not so within {seconds} s"
        await asyncio.sleep(0.002)
