"""When a call may be sent again, and when its time is over; pure: time and randomness are arguments."""

import math
from dataclasses import dataclass

from pdserve.rpc import errors


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how soon a call is sent again that failed as UNAVAILABLE before its first token."""

    attempts: int = 4
    """Sends in all, at least 1; 1 never retries."""
    first_delay_seconds: float = 0.2
    """Longest wait before the second send; it doubles with each further one."""
    longest_delay_seconds: float = 5.0
    """Bound of the doubling."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for fewer than one attempt or a negative delay."""
        if self.attempts < 1 or self.first_delay_seconds < 0 or self.longest_delay_seconds < 0:
            raise errors.InvalidRequest(f"cannot retry like this: {self}")


class Attempts:
    """The sends of one call, under one deadline of `timeout` seconds from the first."""

    def __init__(self, policy: Retry, timeout: float) -> None:
        self._policy = policy
        self._timeout = timeout
        self._deadline = math.inf
        self._sent = 0

    def begin(self, now: float) -> float:
        """Counts a send; the seconds that it may take.

        Raises:
            DeadlinePassed: none are left.
        """
        if self._sent == 0:
            self._deadline = now + self._timeout
        left = self._deadline - now
        if left <= 0:
            raise errors.DeadlinePassed(f"no answer within {self._timeout:g} s")
        self._sent += 1
        return left

    def after(self, error: errors.PdserveError, now: float, random: float) -> float:
        """Seconds to wait before the next send, after one failed with `error`.

        The wait is drawn by `random`, in [0, 1), from the upper half of the bound: clients that
        failed together do not come back together.

        Raises:
            PdserveError: `error` itself, where sending again is not safe, not allowed or too late.
        """
        bound = min(self._policy.longest_delay_seconds, self._policy.first_delay_seconds * 2.0 ** (self._sent - 1))
        delay = bound * (1 + random) / 2
        safe = isinstance(error, errors.Unavailable)
        if not safe or self._sent >= self._policy.attempts or now + delay >= self._deadline:
            raise error
        return delay
