"""What the span of a request says about it: one row of the table of requests. Pure.

The parts are disjoint, in seconds. With `unattributed` they sum to the time to first token, or, of a request that
had none, to the time after which it failed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pdserve.runtime.telemetry import names
from pdserve.traces.span import Span

PARTS = tuple(name for part in names.PARTS for name in ((part, names.RETRY) if part == "route" else (part,)))
"""The parts that are known, in the order in which a request passes them."""
_PREFIX, _FAILED_PREFIX = names.ttft_part(""), names.failed_after_part("")
_NOT_PARTS = (names.UNATTRIBUTED, names.RDMA_WAIT, names.PROXY_SERIALIZATION, names.FAILED_UNATTRIBUTED)
"""The remainder, and the two parts that are said again under a name that people look for."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; times in seconds."""

    trace_id: str
    span_id: str
    start_ns: int
    """Since the epoch."""
    request_id: str = ""
    ttft: float | None = None
    """None: it had no first token."""
    e2e: float | None = None
    mode: str = ""
    """read, write or none."""
    transport: str = ""
    model: str = ""
    outcome: str = ""
    """finished, failed or cancelled."""
    reason: str = ""
    """Of the error that the client got."""
    fallbacks: int = 0
    continuations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    kv_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    unattributed: float | None = None
    failed_after: float | None = None
    """Until it failed, or was cancelled, without a first token; None: it had one."""
    failed_in: str = ""
    """The part in which that was, the last of `parts`."""
    failed_or_later: tuple[str, ...] = ()
    """Parts after it that may have been reached as well: nobody has seen the end of `failed_in`."""


def of(span: Span) -> Request | None:
    """The row of a span; None for one that is not a request's."""
    if span.name != names.REQUEST:
        return None
    tags = span.tags
    e2e = _seconds(tags.get(names.E2E))
    ttft, failed_after = _seconds(tags.get(names.TTFT)), _seconds(tags.get(names.FAILED_AFTER))
    failed = ttft is None and failed_after is not None
    return Request(
        trace_id=span.trace_id,
        span_id=span.span_id,
        start_ns=span.start_ns,
        request_id=_text(tags.get(names.REQUEST_ID)),
        ttft=ttft,
        e2e=(span.end_ns - span.start_ns) / 1e9 if e2e is None else e2e,
        mode=_text(tags.get(names.MODE)),
        transport=_text(tags.get(names.TRANSPORT)),
        model=_text(tags.get(names.GEN_AI_MODEL)),
        outcome=_text(tags.get(names.OUTCOME)),
        reason=_text(tags.get(names.ERROR_TYPE)),
        fallbacks=_count(tags.get(names.FALLBACKS)),
        continuations=_count(tags.get(names.CONTINUATIONS)),
        input_tokens=_count(tags.get(names.GEN_AI_INPUT_TOKENS)),
        output_tokens=_count(tags.get(names.GEN_AI_OUTPUT_TOKENS)),
        kv_bytes=_count(tags.get(names.KV_BYTES)),
        parts=_parts(tags, _FAILED_PREFIX if failed else _PREFIX),
        unattributed=_seconds(tags.get(names.FAILED_UNATTRIBUTED if failed else names.UNATTRIBUTED)),
        failed_after=failed_after if failed else None,
        failed_in=_text(tags.get(names.FAILED_IN)) if failed else "",
        failed_or_later=_texts(tags.get(names.FAILED_OR_LATER)) if failed else (),
    )


def in_order(parts: Iterable[str]) -> list[str]:
    """Parts in the order in which a request passes them; unknown ones last, by name."""
    given = set(parts)
    return [name for name in PARTS if name in given] + sorted(given.difference(PARTS))


def _parts(tags: dict[str, Any], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in tags.items():
        seconds = _seconds(value)
        if key.startswith(prefix) and key not in _NOT_PARTS and seconds is not None:
            found[key.removeprefix(prefix)] = seconds
    return {name: found[name] for name in in_order(found)}


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: Any) -> int:
    """A whole number that a column holds; anything else is 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list | tuple) else ()
