"""The page on the real trace store, and the canned answers held to what that store answers. Nothing is fake but
the traces themselves."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from pdserve.rpc.channel import aio_channel
from pdserve.runtime.clock import Clock
from pdserve.traces.app import TracesApp
from pdserve.traces.config import TracesConfig
from tests.page import samples
from tests.page.browser import Page
from tests.page.samples import Json

ROWS = [
    samples.request(3, "read"),
    samples.request(2, "write"),
    samples.request(1, "none"),
    samples.request(0, parts={"tokenize": 0.001, "retry": 0.09} | samples.READ_PARTS, fallbacks=1),
]
CAUSE = "PEER_LOST: the prefill engine has gone"
STATUS = {"ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR}


class StoppedClock(Clock):
    """A minute after the first of the traces."""

    def unix(self) -> float:
        return samples.START_US / 1e6 + 60


def _value(value: Any) -> AnyValue:
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_value(each) for each in value]))
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)


def _pairs(attributes: Json) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _span(span: Json, trace_id: str) -> Span:
    return Span(
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(span["span_id"]),
        parent_span_id=bytes.fromhex(span["parent_id"]),
        name=span["name"],
        start_time_unix_nano=round(span["start_us"] * 1000),
        end_time_unix_nano=round((span["start_us"] + span["duration_us"]) * 1000),
        attributes=_pairs(span["attributes"]),
        events=[Span.Event(name=each["name"], time_unix_nano=round(each["time_us"] * 1000)) for each in span["events"]],
        links=[
            Span.Link(trace_id=bytes.fromhex(each["trace_id"]), span_id=bytes.fromhex(each["span_id"]))
            for each in span["links"]
        ],
        status=Status(code=STATUS[span["status"]], message=span["status_message"]),
    )


def _export(trace: Json) -> ExportTraceServiceRequest:
    """One resource per span, as good as one per service."""
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(
                    attributes=_pairs({"service.name": span["service"], "service.instance.id": span["instance"]})
                ),
                scope_spans=[ScopeSpans(spans=[_span(span, trace["trace_id"])])],
            )
            for span in trace["spans"]
        ]
    )


@pytest.fixture
async def traces(tmp_path: Path) -> AsyncIterator[str]:
    """A store that has been sent the traces of ROWS; gives its address."""
    config = TracesConfig(otlp_port=0, port=0, file=tmp_path / "traces.sqlite")
    app = await TracesApp.start(config, StoppedClock())
    try:
        async with aio_channel(app.addresses.otlp) as channel:
            send: Any = channel.unary_unary(
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
                request_serializer=ExportTraceServiceRequest.SerializeToString,
                response_deserializer=ExportTraceServiceResponse.FromString,
            )
            for row in ROWS:
                answer = await send(_export(samples.trace(row, CAUSE)), timeout=20)
                assert not answer.partial_success.rejected_spans
        yield f"http://{app.addresses.http}"
    finally:
        await app.aclose()


async def _get(url: str) -> Json:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        found: Json = await answer.json()
        return found


def _close(key: str, a: Any, b: Any) -> bool:
    """Equal; seconds to the nanosecond, microseconds since the epoch to what a double holds of them."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(each, a[each], b[each]) for each in a)
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= (0.5 if key.endswith("_us") else 2e-9)
    return bool(a == b)


async def test_canned_requests_are_what_the_store_answers(traces: str) -> None:
    """/requests has the fields and values that the canned answers have."""
    answer = (await _get(f"{traces}/api/pdserve/requests?limit=50"))["requests"]
    assert len(answer) == len(ROWS)
    for found, row in zip(answer, ROWS, strict=True):
        assert found.keys() == row.keys()
        assert [key for key in row if not _close(key, row[key], found[key])] == []


async def test_canned_traces_are_what_the_store_answers(traces: str) -> None:
    """/trace has the canned spans, but for the critical path, which the store finds by itself."""
    for row in ROWS:
        canned = samples.trace(row, CAUSE)
        found = await _get(f"{traces}/api/pdserve/trace/{row['trace_id']}")
        spans = {span["span_id"]: span for span in found["spans"]}
        assert len(spans) == len(canned["spans"])
        for span in canned["spans"]:
            there = spans[span["span_id"]]
            assert isinstance(there["critical"], bool)
            other = [
                key for key in span if key not in ("critical", "events") and not _close(key, span[key], there[key])
            ]
            assert other == [], (span, there)
            assert [event["name"] for event in there["events"]] == [event["name"] for event in span["events"]]


async def test_canned_percentiles_have_the_stores_shape(traces: str) -> None:
    """/parts has the keys that the canned answers have; nothing in the window is an empty answer, not an error."""
    found = await _get(f"{traces}/api/pdserve/parts?window=3600&bucket=60&mode=read")
    canned = samples.parts("read")
    assert found.keys() == canned.keys()
    assert found["buckets"][0].keys() == canned["buckets"][0].keys()
    assert set(canned["parts"]) <= set(found["parts"])
    assert found["total"]["count"] == 2
    assert {"ttft", "kv.wait"} <= found["total"]["p50"].keys()
    empty = await _get(f"{traces}/api/pdserve/parts?window=1&bucket=1&mode=read")
    assert (empty["parts"], empty["buckets"], empty["total"]["count"]) == ([], [], 0)


async def test_the_page_works_on_the_store(page: Page, traces: str) -> None:
    """All views, as the store serves them with its content policy; the browser has nothing to complain of."""
    await page.goto(f"{traces}/")
    await page.until("document.querySelectorAll('.rows .row').length === 4")
    await page.click(".rows .row:first-child a")
    await page.until("document.querySelectorAll('.spans li').length > 10")
    assert await page.text("h1") == ROWS[0]["request_id"]
    assert await page.text(".parts .total td") == f"{ROWS[0]['ttft'] * 1e3:.3f}"
    assert await page.run("document.querySelectorAll('.span-bar.critical').length") > 5
    assert await page.run("fetch(document.querySelector('.json').href).then((a) => a.json()).then((b) => b.total)") == 1
    await page.goto(f"{traces}/#/compare")
    await page.until("document.querySelectorAll('.medians tbody tr').length > 10")
    await page.goto(f"{traces}/#/time?series=kv.wait")
    await page.until("document.querySelector('.chart .dot')")
    await page.goto(f"{traces}/#/request/{'ab' * 16}")
    await page.until("document.querySelector('.empty h2')?.innerText.includes('No such trace')")
    assert [said for said in page.complaints if "404" not in said] == []
    page.complaints.clear()
