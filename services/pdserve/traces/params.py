"""What a URL's query asks for, in the words of Jaeger's pages and of ours. Pure.

Jaeger's v1 counts microseconds, its v3 writes RFC 3339 in snake or camel case; durations are as `1.5s`.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from pdserve.rpc.errors import InvalidRequest
from pdserve.traces.search import Search, duration

MAX_TRACES = 1000
MAX_REQUESTS = 10_000
MAX_BUCKETS = 2000
_LOOKBACK_NS = 2 * 24 * 3600 * 10**9
"""How far back a search goes that does not say."""
_DAYS = re.compile(r"(\d+)([dw])")


class Query(Protocol):
    """The part of a multi-valued mapping that is used."""

    def get(self, key: str, default: str, /) -> str: ...
    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]: ...


def number(query: Query, name: str, default: int, most: int) -> int:
    """A whole number from 1 to `most`.

    Raises:
        InvalidRequest: it is none.
    """
    text = query.get(name, "") or str(default)
    if not text.isdecimal() or len(text) > 18 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"{name}={text}: a whole number from 1 to {most} is needed")
    return int(text)


def search(query: Query, now_ns: int) -> Search:
    """A search of Jaeger's v1.

    Raises:
        InvalidRequest: a value cannot be read; the message names it.
    """
    end = _microseconds(query, "end", now_ns)
    lookback = query.get("lookback", "")
    start = _microseconds(query, "start", end - _lookback(lookback))
    return Search(
        start_ns=start,
        end_ns=end,
        service=query.get("service", ""),
        operation=query.get("operation", ""),
        min_ns=_duration(query, "minDuration", 0),
        max_ns=_duration(query, "maxDuration", (1 << 63) - 1),
        tags=_tags(query.get("tags", ""), query.getall("tag", ())),
        limit=number(query, "limit", 20, MAX_TRACES),
    )


def search_v3(query: Query, now_ns: int) -> Search:
    """A search of Jaeger's v3: `query.service_name` or `query.serviceName`, and so on.

    Raises:
        InvalidRequest: a value cannot be read; the message names it.
    """

    def one(snake: str) -> str:
        head, *rest = snake.split("_")
        camel = head + "".join(word.title() for word in rest)
        return query.get(f"query.{snake}", "") or query.get(f"query.{camel}", "")

    limit = one("num_traces") or one("search_depth") or "20"
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_TRACES:
        raise InvalidRequest(f"query.num_traces={limit}: a whole number from 1 to {MAX_TRACES} is needed")
    shortest, longest = one("duration_min"), one("duration_max")
    end = _instant(one("start_time_max"), now_ns)
    return Search(
        start_ns=_instant(one("start_time_min"), end - _LOOKBACK_NS),
        end_ns=end,
        service=one("service_name"),
        operation=one("span_name") or one("operation_name"),
        min_ns=duration(shortest) if shortest else 0,
        max_ns=duration(longest) if longest else (1 << 63) - 1,
        tags=_tags(one("attributes"), ()),
        limit=int(limit),
    )


def span_of_time(query: Query, now_ns: int) -> tuple[int, int]:
    """First and last nanosecond of /api/dependencies' endTs and lookback, both milliseconds.

    Raises:
        InvalidRequest: one is no number.
    """
    end = number(query, "endTs", now_ns // 10**6, 1 << 43) * 10**6
    return end - number(query, "lookback", _LOOKBACK_NS // 10**6, 1 << 43) * 10**6, end


def trace_id(text: str) -> str:
    """A trace id in full: 32 digits, shorter ones filled up as Jaeger does.

    Raises:
        InvalidRequest: it is none.
    """
    if not re.fullmatch("[0-9a-fA-F]{1,32}", text):
        raise InvalidRequest(f"{text[:64]!r} is not a trace id of up to 32 hexadecimal digits")
    return text.lower().zfill(32)


def _microseconds(query: Query, name: str, default_ns: int) -> int:
    text = query.get(name, "")
    if not text:
        return default_ns
    if not text.isdecimal() or len(text) > 15 + 1:
        raise InvalidRequest(f"{name}={text[:64]}: microseconds since the epoch are needed")
    return int(text) * 1000


def _instant(text: str, default_ns: int) -> int:
    if not text:
        return default_ns
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text[:64]!r} is not a time, as 2026-01-31T12:00:00Z") from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e9)


def _duration(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    return duration(text) if text else default


def _lookback(text: str) -> int:
    """`1h`, also `2d` and `1w`; what it cannot be (`custom`, where start and end are given) is the default."""
    days = _DAYS.fullmatch(text)
    if days:
        return min(int(days[1]), 10_000) * (7 if days[2] == "w" else 1) * 24 * 3600 * 10**9
    return _LOOKBACK_NS if text in ("", "custom") else duration(text)


def _tags(text: str, pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if text:
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
            raise InvalidRequest('tags is not a JSON object of strings, as {"error": "true"}')
        found |= given
    for pair in pairs:
        key, colon, value = pair.partition(":")
        if not colon:
            raise InvalidRequest(f"tag={pair[:64]} is not KEY:VALUE")
        found[key] = value
    return found
