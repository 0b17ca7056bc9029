"""A workload out of a live proxy's metrics: two readings and what lies between. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdserve.bench.workload.lengths import Span
from pdserve.planner.planning.workload import Workload
from pdserve.rpc.errors import ConfigError

_ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a proxy's counters say at a moment; all since it began."""

    at: float
    """Seconds of one clock."""
    ended: float
    """Requests that have ended, however."""
    open: float
    """Requests that have been taken and have not ended."""
    input: float
    """Prompt tokens of requests that have ended."""
    output: float
    """Their answers' tokens."""
    cached: float
    """Prompt tokens that a prefix cache had."""
    engines: dict[str, int]
    """Ready engines by role."""
    modes: dict[str, float]
    """Requests that have ended by the mode of their hand-over: `read`, `write`, `none`."""


def read(text: str, at: float) -> Reading:
    """A page in Prometheus' text format.

    Raises:
        ConfigError: it is not that, or not a pdserve proxy's.
    """
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"these are no metrics in Prometheus' text format: {error}") from error
    if "pdserve_proxy_queued" not in found:
        raise ConfigError("these are not the metrics of a pdserve proxy: no pdserve_proxy_queued")

    def total(name: str, **labels: str) -> float:
        return sum(value for has, value in found.get(name, ()) if labels.items() <= has.items())

    ready = {role: total("pdserve_proxy_engines", role=role, state="ready") for role in _ROLES}
    return Reading(
        at=at,
        ended=total("pdserve_requests_total"),
        open=total("pdserve_proxy_queued") + total("pdserve_proxy_in_flight"),
        input=total("pdserve_tokens_total", kind="input"),
        output=total("pdserve_tokens_total", kind="output"),
        cached=total("pdserve_tokens_total", kind="cached"),
        engines={role: int(count) for role, count in ready.items()},
        modes={mode: total("pdserve_requests_total", mode=mode) for mode in ("read", "write", "none")},
    )


def workload(first: Reading, second: Reading) -> Workload:
    """What came between two readings: the rate of arrivals, and the mean lengths and hit rate of what ended.

    Raises:
        ConfigError: no request ended, or none arrived.
        ConfigError: the readings are not in order, or the proxy was started anew between them.
    """
    seconds = second.at - first.at
    if seconds <= 0:
        raise ConfigError("two readings of one moment")
    if second.ended < first.ended or second.input < first.input:
        raise ConfigError("the proxy was started anew between the readings: its counters begin again")
    ended = second.ended - first.ended
    arrived = ended + second.open - first.open
    if ended < 1 or arrived < 1:
        raise ConfigError(f"no request was answered, or none came, within {seconds:.0f} s")
    tokens = second.input - first.input
    prompt, output = (max(1, round(value / ended)) for value in (tokens, second.output - first.output))
    hits = (second.cached - first.cached) / tokens if tokens else 0.0
    return Workload(Span(prompt, prompt), Span(output, output), min(1.0, max(0.0, hits)), rate=arrived / seconds)


def modes(first: Reading, second: Reading) -> dict[str, float]:
    """Requests that ended between two readings, by the mode of their hand-over."""
    return {mode: count - first.modes[mode] for mode, count in second.modes.items()}


def deployed(roles: dict[str, int]) -> str:
    """What runs now, in words; empty where nothing does."""
    said = _listed((f"{count} {role}" for role, count in roles.items() if count))
    return f"{said} engines are ready" if said else "no engine is ready"


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items)
