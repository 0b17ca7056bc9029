"""How often a process that has died is started again, and after which pause; pure.

death      1st  2nd  3rd  4th ...
pause      0 s  1 s  2 s  3 s      a process that dies at once again should not take the machine's time
"""

from pdserve.rpc.errors import ConfigError

DEFAULT = 2
"""Restarts of each process. A crash now and then is survived; what dies a third time needs somebody to look at it."""
STEP = 1.0
"""Seconds by which each pause is longer than the one before."""


class Allowance:
    """The restarts of one process."""

    def __init__(self, most: int, step: float = STEP) -> None:
        """`most`: how many there are; `step`: seconds.

        Raises:
            ConfigError: fewer than none.
        """
        if most < 0:
            raise ConfigError(f"a process cannot be started again {most} times")
        self.most = most
        self._step = step
        self.used = 0
        """Restarts so far."""

    def take(self) -> float | None:
        """Uses one up: the seconds to wait before it. None, and nothing is used up, where there is none left."""
        if self.used >= self.most:
            return None
        self.used += 1
        return self._step * (self.used - 1)
