"""Requests side by side: none is left running."""

import asyncio

import pytest

from pdserve.planner.measuring.together import together
from pdserve.rpc.errors import PdserveError


async def test_first_error_ends_the_others() -> None:
    """It is raised as it is, not as a group, and when it is the others have ended, their own endings included."""
    ended: list[str] = []
    begun = asyncio.Event()

    async def stream() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("closed")

    async def fails() -> None:
        await begun.wait()
        raise PdserveError("a request failed")

    async def both() -> None:
        async with together() as group:
            group.create_task(stream())
            group.create_task(fails())

    with pytest.raises(PdserveError, match="a request failed"):
        await both()
    assert ended == ["closed"]


async def test_error_of_the_body_ends_them_too() -> None:
    """So it is where the one who waits for them fails."""
    cancelled: list[bool] = []

    async def stream() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def prompt_beside() -> None:
        async with together() as group:
            group.create_task(stream())
            await asyncio.sleep(0)
            raise PdserveError("the prompt failed")

    with pytest.raises(PdserveError, match="the prompt failed"):
        await prompt_beside()
    assert cancelled == [True]
