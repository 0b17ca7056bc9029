"""The sink of a proxy that serves: one process that draws in what the machine has left over, and a second, with a share
of its own, while the first is behind.

Requests never wait for the first (child.py says why), and a machine that is full has next to nothing left over. Traces
would be missing just from the hour that has to be explained: then a second one is started and gets the records. It
stays, since a machine that was full once will be again.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NoReturn, Self

import structlog

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.apart import Apart
from pdserve.runtime.clock import Clock
from pdserve.runtime.telemetry.span import Counts

log = structlog.get_logger(__name__)

LATE_S: Final = 1.0
"""Seconds that a record may wait to be drawn, until those that come meanwhile are the second one's."""


class Relieved:
    """An `ended.Sink`; `async with` starts and ends the processes. On one loop."""

    def __init__(self, calm: Sequence[str], urgent: Sequence[str], clock: Clock, late: float = LATE_S) -> None:
        """`calm`, `urgent`: how the first and the second are started, see `apart.command`. `late`: see LATE_S."""
        self._urgent = urgent
        self._clock = clock
        self._late = late
        self.first = Apart(calm, clock)
        self.second: Apart | None = None
        """None: it was never needed."""

    async def __aenter__(self) -> Self:
        self.first.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __call__(self, ended: Ended) -> None:
        """Hands the record on, or drops it."""
        if self.first.behind(self._late):
            if self.second is None:
                log.warning("traces_behind", records=self.first.unread)
                self.second = Apart(self._urgent, self._clock)
                self.second.start()
            if self.second.ready:
                self.second(ended)
                return
        self.first(ended)

    @property
    def counts(self) -> Counts:
        """Of both: see `Apart.counts`."""
        first, second = self.first.counts, Counts(0, 0, 0) if self.second is None else self.second.counts
        return Counts(
            exported=first.exported + second.exported,
            dropped=first.dropped + second.dropped,
            failed=first.failed + second.failed,
            undrawn=first.undrawn + second.undrawn,
        )

    async def failed(self) -> NoReturn:
        """See `Apart.failed`; what makes the second one impossible has made the first so before."""
        await self.first.failed()

    async def aclose(self) -> None:
        """Lets both send what they have, for at most apart.CLOSE_S; safe twice."""
        await asyncio.gather(*(one.aclose() for one in (self.first, self.second) if one is not None))
