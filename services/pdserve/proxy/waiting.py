"""What both queues of requests wait with: a place that is given, or a time that is over."""

import asyncio
from typing import Any


async def comes(place: asyncio.Future[Any], seconds: float) -> bool:
    """Whether what is waited for is there within `seconds`. Not asyncio.timeout: where both come in one turn of the
    loop, that would lose what came."""
    await asyncio.wait((place,), timeout=max(seconds, 0.0))
    return place.done()


def nobody() -> None:
    """Is told that a request waits, where nobody asks."""
