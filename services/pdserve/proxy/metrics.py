"""What the proxy shows of its requests and engines: counted as requests end, read from its books otherwise."""

from collections.abc import Iterator

import structlog

from pdserve.proxy import parts
from pdserve.proxy.credits import Ledger
from pdserve.proxy.ended import Ended, Outcome
from pdserve.proxy.inference import Inference
from pdserve.proxy.parts import Point
from pdserve.proxy.tracing.figures import giver
from pdserve.proxy.types import Finished, Mode, Role
from pdserve.rpc.errors import PdserveError
from pdserve.runtime.telemetry import catalogue as c
from pdserve.runtime.telemetry import names
from pdserve.runtime.telemetry.span import Counts
from pdserve.runtime.telemetry.tally import Reading, Tally

log = structlog.get_logger(__name__)

UNATTRIBUTED = "unattributed"
"""The part that no stamp explains."""
_STATES = ("ready", "draining", "suspect")


class RequestCounts:
    """Counts requests; `ended` is an `ended.Sink`."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def ended(self, ended: Ended) -> None:
        """One request is over."""
        try:
            self._count(ended)
        except Exception as defect:  # a count that goes wrong must not spoil the answer
            log.error("metrics_failed", request_id=ended.request_id, exc_info=defect)

    def refused(self, error: PdserveError) -> None:
        """One was not taken."""
        self._tally.add(c.REFUSALS, error.reason)

    def gap(self, seconds: float, mode: Mode | None) -> None:
        """A piece of an answer has followed another."""
        self._tally.observe(c.ITL, seconds, _mode(mode))

    def _count(self, ended: Ended) -> None:
        tally, finished = self._tally, ended.finished
        last = ended.attempts[-1].mode if ended.attempts else None
        mode = _mode(finished.mode if finished else last)
        tally.add(c.REQUESTS, ended.outcome.value, ended.reason, mode, ended.model)
        for tried in ended.attempts:
            tally.add(c.ATTEMPTS, tried.reason, _mode(tried.mode))
        tally.add(c.FALLBACKS, by=ended.fallbacks)
        tally.add(c.CONTINUATIONS, by=ended.continuations)
        tally.add(c.TOKENS, "input", by=ended.prompt_tokens)
        tally.add(c.TOKENS, "output", by=ended.completion_tokens)
        if finished is not None:
            self._count_answer(finished, mode)
        self._time(ended)

    def _count_answer(self, finished: Finished, mode: str) -> None:
        self._tally.add(c.TOKENS, "cached", by=finished.usage.cached_tokens)
        self._tally.add(c.RECOMPUTED_TOKENS, by=finished.recomputed_tokens)
        facts = finished.transfer
        if facts is not None and facts.transport:
            self._tally.add(c.KV_BYTES, mode, facts.transport, by=facts.kv_bytes)
            self._tally.add(c.KV_OVERLAPPED_BYTES, mode, facts.transport, by=facts.overlapped_bytes)

    def _time(self, ended: Ended) -> None:
        """As the spans have it: from the same stamps, by the same code."""
        tally, at = self._tally, ended.points
        kind = (names.CHAT if ended.chat else names.COMPLETION, names.PROVIDER, ended.model)
        tally.observe(c.DURATION, (ended.ended_ns - at[Point.RECEIVED]) / 1e9, *kind, ended.reason)
        first = giver(ended)
        if first is None or Point.FIRST_BYTE_WRITTEN not in at:
            return
        path = parts.chain(handed_over=bool(first.prefill_engine_id), retried=Point.REDISPATCHED in at)
        timings = parts.split(at, path, ended.ended_ns, first.mode)
        tally.observe(c.TTFT, timings.ttft, *kind)
        for part, seconds in timings.parts.items():
            tally.observe(c.TTFT_PART, seconds, part, _mode(first.mode))
        tally.observe(c.TTFT_PART, timings.unattributed, UNATTRIBUTED, _mode(first.mode))
        answers = ended.sampling.n
        if ended.outcome is Outcome.FINISHED and ended.completion_tokens > answers:
            each = (ended.completion_tokens - answers) / answers  # they run side by side
            tally.observe(c.TPOT, (timings.e2e - timings.ttft) / each, *kind)


def readings(inference: Inference, ledger: Ledger) -> Iterator[Reading]:
    """What is true now of the queue and the engines."""
    topology = inference.topology()
    yield c.PROXY_QUEUED, (), topology.queued
    yield c.PROXY_IN_FLIGHT, (), topology.in_flight
    engines = {(role.value, state): 0 for role in Role for state in _STATES}
    for line in topology.engines:
        key = (line.role, line.state)
        engines[key] = engines.get(key, 0) + 1
        if not line.engine_id:
            continue  # a stranger: it has no credits, and no identity that could be trusted
        who = (line.engine_id, line.role)
        reserved, available = ledger.reserved(line.engine_id), ledger.available(line.engine_id)
        others = max(0, line.total_kv_tokens - reserved - available)
        yield c.PROXY_CREDIT_TOKENS, (*who, "reserved"), reserved
        yield c.PROXY_CREDIT_TOKENS, (*who, "others"), others
        yield c.PROXY_CREDIT_TOKENS, (*who, "available"), available
        yield c.PROXY_ENGINE_REQUESTS, (*who, "running"), line.running
        yield c.PROXY_ENGINE_REQUESTS, (*who, "waiting"), line.waiting
        yield c.PROXY_BEAT_AGE, who, line.beat_age_seconds
    for labels, number in engines.items():
        yield c.PROXY_ENGINES, labels, number


def span_readings(counts: Counts) -> Iterator[Reading]:
    """What has become of the spans so far; each series is there from the start, so that its first step is seen."""
    yield c.PROXY_SPANS, ("exported",), counts.exported
    yield c.PROXY_SPANS, ("dropped",), counts.dropped
    yield c.PROXY_SPANS, ("failed",), counts.failed
    yield c.PROXY_UNDRAWN, (), counts.undrawn


def _mode(mode: Mode | None) -> str:
    return mode.value if mode else "none"
