"""Work that ends early when something else goes wrong first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(work: Coroutine[Any, Any, T], trouble: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, or what `trouble` raises where that comes first.

    Neither is left running: the other is cancelled and has cleaned up when this returns or raises.
    A `trouble` that returns means that none is to come.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(trouble)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
            await asyncio.wait((working,))
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    return working.result()
