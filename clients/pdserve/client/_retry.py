"""When a call may be sent again, and when its time is over; pure: time and randomness are arguments."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.rpc import errors

Told = Callable[[errors.PdserveError, float], None]
"""Called with a failure and the seconds until the call is sent again."""


def not_ours(error: errors.PdserveError, cancelled: bool) -> errors.PdserveError:
    """What a failed call means; `cancelled`: we have cancelled it ourselves.

    A call that meets the very end of a server is cancelled by gRPC, without a word of the server's.
    """
    if isinstance(error, errors.RequestCancelled) and not cancelled:
        return errors.Unavailable("the proxy has ended, or was cut off, under the call")
    return error


def unheard(error: errors.PdserveError, seconds: float) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How long, how often and how soon a call is sent again that failed as UNAVAILABLE before its first token."""

    attempts: int | None = None
    """Sends in all, at least 1; 1 never retries; None: as many as `seconds` has room for."""
    first_delay_seconds: float = 0.2
    """Longest wait before the second send; it doubles with each further one."""
    longest_delay_seconds: float = 2.0
    """Bound of the doubling."""
    seconds: float = 60.0
    """No send begins later than this after the first, nor after the call's own timeout. Longer than a proxy, or an
    engine with a small model, takes until it serves again."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for fewer than one attempt or a negative time."""
        times = (self.first_delay_seconds, self.longest_delay_seconds, self.seconds)
        if (self.attempts is not None and self.attempts < 1) or not all(time >= 0 for time in times):
            raise errors.InvalidRequest(f"cannot retry like this: {self}")


class Attempts:
    """The sends of one call, under one deadline of `timeout` seconds from the first."""

    def __init__(self, policy: Retry, timeout: float, told: Told = unheard) -> None:
        """`told`: see Told; neither blocks nor raises."""
        self._policy = policy
        self._timeout = timeout
        self._told = told
        self._deadline = math.inf
        self._last_send = math.inf
        self._sent = 0
        self._died = 0

    def begin(self, now: float) -> float:
        """Counts a send; the seconds that it may take.

        Raises:
            DeadlinePassed: none are left.
        """
        if self._sent == 0:
            self._deadline = now + self._timeout
            self._last_send = now + self._policy.seconds
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
        doubled = math.ldexp(self._policy.first_delay_seconds, min(self._sent - 1, 60))
        delay = min(self._policy.longest_delay_seconds, doubled) * (1 + random) / 2
        self._died += isinstance(error, errors.EngineDied)
        # The engine may have died of this very prompt: one more is risked, not every one that is started.
        safe = isinstance(error, errors.Unavailable) and self._died <= 1
        used_up = self._policy.attempts is not None and self._sent >= self._policy.attempts
        if not safe or used_up or now + delay >= self._deadline or now + delay > self._last_send:
            raise error
        self._told(error, delay)
        return delay
