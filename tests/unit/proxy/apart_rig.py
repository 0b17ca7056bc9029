"""Processes that draw, with the clock and the records of their tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pdserve.proxy.ended import Ended
from pdserve.proxy.tracing.apart import Apart
from pdserve.proxy.tracing.apart import command as as_served
from pdserve.proxy.tracing.spans import spans_of
from pdserve.runtime.clock import Clock
from pdserve.runtime.log import LogFormat, LogLevel
from tests.unit.proxy.records import OFFSET, TRACE, record
from tests.unit.proxy.undisturbed import command
from tests.waiting import until

COMMAND = command(0.02, LogFormat.JSON, LogLevel.INFO)
CALM = as_served(0.02, LogFormat.JSON, LogLevel.INFO)
WHOLE = len(spans_of(record(), OFFSET))
"""Spans of `record()`."""


class At(Clock):
    """Makes the proxy's clock that of the records."""

    def monotonic_ns(self) -> int:
        """See Clock."""
        return 500

    def unix_ns(self) -> int:
        """See Clock."""
        return OFFSET + 500


@asynccontextmanager
async def ready() -> AsyncIterator[Apart]:
    """With a process that takes records."""
    async with Apart(COMMAND, At()) as apart:
        await until(lambda: apart.ready)
        yield apart


def numbered(number: int) -> Ended:
    """The usual record, in a trace of its own."""
    return record(trace=replace(TRACE, trace_id=f"{number:032x}"))


def alive(pid: int) -> bool:
    """Whether there is such a process, a zombie included."""
    return Path(f"/proc/{pid}").exists()
