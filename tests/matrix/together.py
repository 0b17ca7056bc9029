"""Several things at once, which end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Waits for all of them. The first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
