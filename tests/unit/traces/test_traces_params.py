"""What a URL asks for is read or refused by name."""

import pytest
from multidict import MultiDict

from pdserve.rpc.errors import InvalidRequest
from pdserve.traces import params
from pdserve.traces.search import Search, duration

NOW = 1_700_000_000 * 10**9
DAY = 24 * 3600 * 10**9


def query(*pairs: tuple[str, str]) -> MultiDict[str]:
    return MultiDict(pairs)


@pytest.mark.parametrize(
    ("text", "ns"),
    [("1.5s", 1_500_000_000), ("100ms", 10**8), ("1h2m", 3720 * 10**9), ("3us", 3000), ("7ns", 7), (".5ms", 500_000)],
)
def test_durations_are_gos(text: str, ns: int) -> None:
    """As Jaeger's page sends them."""
    assert duration(text) == ns


@pytest.mark.parametrize("text", ["", "5", "s", "1.5", "1s2", "-1s", "1 s", "1d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """Rather than taken for zero."""
    with pytest.raises(InvalidRequest, match="is not a duration"):
        duration(text)


def test_a_search_of_jaegers_page() -> None:
    """Every field of its form, times in microseconds, tags as JSON and as pairs."""
    asked = params.search(
        query(
            ("service", "s"), ("operation", "o"), ("start", "1000"), ("end", "2000"), ("limit", "7"),
            ("lookback", "custom"), ("minDuration", "1ms"), ("maxDuration", "2ms"), ("tags", '{"error":"true"}'),
            ("tag", "a:b:c"),
        ),
        NOW,
    )  # fmt: skip
    assert asked == Search(10**6, 2 * 10**6, "s", "o", 10**6, 2 * 10**6, {"error": "true", "a": "b:c"}, 7)


def test_a_search_that_says_little() -> None:
    """Two days back, or as far as lookback says, and 20 traces."""
    asked = params.search(query(("service", "s")), NOW)
    assert (asked.start_ns, asked.end_ns, asked.limit) == (NOW - 2 * DAY, NOW, 20)
    assert params.search(query(("lookback", "1h")), NOW).start_ns == NOW - 3600 * 10**9
    assert params.search(query(("lookback", "2w")), NOW).start_ns == NOW - 14 * DAY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"), ("limit", "1001"), ("limit", "x"), ("start", "-1"), ("start", "now"), ("end", "9" * 30),
        ("tags", "{"), ("tags", "[]"), ("tags", '{"a":1}'), ("tag", "a"), ("minDuration", "1"), ("lookback", "ever"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(name: str, value: str) -> None:
    """With the reason, not with an empty result."""
    with pytest.raises(InvalidRequest):
        params.search(query((name, value)), NOW)


@pytest.mark.parametrize("camel", [False, True])
def test_a_search_of_version_3(camel: bool) -> None:
    """Snake and camel case, RFC 3339 times."""
    snake = {
        "service_name": "s", "span_name": "o", "start_time_min": "2023-11-14T22:13:20Z",
        "start_time_max": "2023-11-14T22:13:21.5Z", "num_traces": "3", "duration_min": "1ms", "attributes": '{"k":"v"}',
    }  # fmt: skip

    def name(text: str) -> str:
        head, *rest = text.split("_")
        return head + "".join(word.title() for word in rest) if camel else text

    asked = params.search_v3(query(*((f"query.{name(key)}", value) for key, value in snake.items())), 0)
    assert asked == Search(NOW, NOW + 1_500_000_000, "s", "o", 10**6, (1 << 63) - 1, {"k": "v"}, 3)


@pytest.mark.parametrize("text", ["", "x", "g" * 32, "0" * 33, "../etc"])
def test_what_is_no_trace_id_is_refused(text: str) -> None:
    """Before the store is asked."""
    with pytest.raises(InvalidRequest, match="trace id"):
        params.trace_id(text)


def test_a_short_trace_id_is_filled_up() -> None:
    """As Jaeger does with ids of 64 bits."""
    assert params.trace_id("ABC1") == "0" * 28 + "abc1"
