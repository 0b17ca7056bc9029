"""When requests are sent: seconds from the run's start, ascending. Pure; numpy draws, from what it is given."""

import math
from typing import TYPE_CHECKING

from pdserve.rpc.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


def like_vllm(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """The send times of `vllm bench serve` 0.32 for the same --request-rate, --burstiness and --seed.

    Args:
        rate: requests a second.
        burstiness: the gamma distribution's shape; 1 is Poisson, below it bursts, above it evens out, infinite is even.
        count: how many requests.
        seed: as `--seed`.

    Returns:
        Seconds from the start. The first is not 0: the first gap is drawn as well. They are stretched so that the
        last is count / rate (vllm/benchmarks/serve.py, `get_request`).

    Raises:
        ConfigError: a value that cannot be.
    """
    import numpy as np

    _check(rate, burstiness, count)
    # The legacy generator, seeded: the very stream that `vllm bench serve` reads from numpy's global one.
    rng = np.random.RandomState(seed)
    gaps = _gaps(rate, burstiness, count, rng)
    times: list[float] = []
    for gap in gaps:
        times.append(gap + times[-1] if times else gap)
    factor = count / rate / times[-1]
    return [time * factor for time in times]


def gamma(rate: float, burstiness: float, count: int, rng: "np.random.Generator") -> list[float]:
    """Gaps from a gamma distribution of mean 1 / rate and shape `burstiness`. The first request is at 0.

    The gaps' coefficient of variation is 1 / sqrt(burstiness).

    Raises:
        ConfigError: a value that cannot be.
    """
    _check(rate, burstiness, count)
    gaps = _gaps(rate, burstiness, count - 1, rng)
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    return times


def scaled(times: list[float], rate: float) -> list[float]:
    """Recorded times at another mean rate: the same pattern, faster or slower.

    The mean rate of n requests is n - 1 gaps over the time from the first to the last.

    Raises:
        ConfigError: the rate is not positive, or all times are equal.
    """
    _check(rate, 1.0, len(times))
    span = times[-1] - times[0]
    if span <= 0:
        raise ConfigError("all requests of the trace have the same time: they cannot be sent at another rate")
    factor = (len(times) - 1) / rate / span
    return [(time - times[0]) * factor for time in times]


def _gaps(
    rate: float, burstiness: float, count: int, rng: "np.random.Generator | np.random.RandomState"
) -> list[float]:
    if burstiness == math.inf:
        return [1.0 / rate] * count
    # One draw a gap: a vector's draws need not be the same stream.
    theta = 1.0 / (rate * burstiness)
    return [float(rng.gamma(shape=burstiness, scale=theta)) for _ in range(count)]


def _check(rate: float, burstiness: float, count: int) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError(f"a rate of {rate:g} requests a second: it must be positive and finite")
    if not burstiness > 0:
        raise ConfigError(f"a burstiness of {burstiness:g}: it must be positive")
    if count < 1:
        raise ConfigError(f"{count} requests: there must be at least one")
