"""The failpoints of one process, commanded from outside: see pdserve.runtime.failpoints.control."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.runtime.failpoints import Count, Point

COMMAND_S = 5.0


@dataclass(frozen=True, slots=True)
class Failpoints:
    """A process whose control socket is at `path`. A stopped or dead one does not answer."""

    path: Path

    async def arm(self, point: Point, terms: str) -> None:
        """From now on these terms act, counted from zero; who waits at the point goes on waiting."""
        await self._say(do="arm", point=point.value, terms=terms)

    async def disarm(self, point: Point) -> None:
        """Nothing happens there any more, and who waits there goes on; counts stay."""
        await self._say(do="disarm", point=point.value)

    async def release(self, point: Point) -> None:
        """Lets those go on who wait there; the terms stay armed."""
        await self._say(do="release", point=point.value)

    async def clear(self) -> None:
        """Disarms all, releases all, forgets the counts."""
        await self._say(do="clear")

    async def count(self, point: Point) -> Count:
        """What has happened there since it was armed."""
        return await self.awaited(point, seconds=0.0)

    async def awaited(self, point: Point, *, fired: int = 0, waiting: int = 0, seconds: float = COMMAND_S) -> Count:
        """Waits until the point has fired so often and so many wait there; the counts then, or after
        `seconds`."""
        said = await self._say(do="await", point=point.value, fired=fired, waiting=waiting, seconds=seconds)
        return Count(**said)

    async def _say(self, **command: Any) -> dict[str, Any]:
        """One command over a connection of its own.

        Raises:
            OSError: nobody listens: the process is gone.
            TimeoutError: no answer; the process is stopped.
        """
        async with asyncio.timeout(COMMAND_S + float(command.get("seconds", 0.0))):
            reader, writer = await asyncio.open_unix_connection(self.path)
            try:
                writer.write(json.dumps(command).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        if not line:
            raise ConnectionResetError(f"{self.path}: the process ended under a command")
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{command}: {answer['error']}"
        return answer
