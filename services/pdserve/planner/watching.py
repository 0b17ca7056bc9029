"""Plans for what a live proxy serves, window by window: the adapter over its metrics."""

import http.client
import time
import urllib.request
from collections.abc import Callable, Mapping

from pdserve.planner.planning import metrics
from pdserve.planner.planning.metrics import Reading
from pdserve.planner.planning.workload import Workload
from pdserve.rpc.errors import ConfigError

_HTTP_S = 10.0
"""Longest wait for a page of metrics, seconds."""


def watch(
    url: str,
    window: float,
    plan: Callable[[Workload, Reading, Mapping[str, float]], None],
    say: Callable[[str], None],
    *,
    once: bool = False,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Calls `plan` with what came in each window, the reading at its end, and how many requests ended in the window by
    the mode of their hand-over, until interrupted.

    A page that cannot be read, a proxy that was started anew, a window in which nothing came and one that cannot be
    planned for are told to `say` in a line, and the next window begins. The first reading has to succeed.

    Args:
        url: the proxy's, http://HOST:PORT.
        window: seconds between two readings.
        plan: raises ConfigError for what cannot be planned for.
        say: takes a line.
        once: one window, of which nothing is forgiven.
        wait: takes seconds.
        clock: gives seconds.

    Raises:
        ConfigError: no such address, or no proxy there at the beginning; with `once` whatever goes wrong.
    """
    if not 0 < window < float("inf"):
        raise ConfigError(f"--window {window:g}: a positive number of seconds")
    before: Reading | None = read(url, clock())
    while True:
        wait(window)
        now: Reading | None = None
        try:
            now = read(url, clock())
            if before is not None:
                plan(metrics.workload(before, now), now, metrics.modes(before, now))
        except ConfigError as error:
            if once:
                raise ConfigError(f"{url}: {error.message}") from error
            say(error.message)
        if once:
            return
        before = now


def read(url: str, at: float) -> Reading:
    """A proxy's counters now, which is `at`, seconds of one clock.

    Raises:
        ConfigError: no such address, nobody answers, or something else does.
    """
    where = url if url.endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    if not where.startswith(("http://", "https://")):
        raise ConfigError(f"--watch {url}: an address as http://HOST:PORT")
    try:
        with urllib.request.urlopen(where, timeout=_HTTP_S) as answer:  # the scheme is checked above
            text = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where} does not give its metrics: {said}") from error
    return metrics.read(text, at)
