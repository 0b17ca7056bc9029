"""The one clock adapter of each process: everything that needs the time is given this."""

import time
from functools import cache
from pathlib import Path

from pdserve.runtime.failpoints import FAILPOINTS, Point


class Clock:
    """Real time. Tests pass a subclass that answers what they say."""

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC; comparable between processes of one boot."""
        return time.monotonic_ns()

    def unix(self) -> float:
        """Seconds since the epoch; for expiry of what crosses hosts."""
        return time.time() + _off()

    def unix_ns(self) -> int:
        """Nanoseconds since the epoch; for traces, which are read beside other machines'."""
        return time.time_ns() + int(_off() * 1e9)


def _off() -> float:
    return FAILPOINTS.value(Point.CLOCK) if FAILPOINTS.armed else 0.0


@cache
def boot_id() -> str:
    """The kernel's boot id: stamps under equal ids compare directly."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
