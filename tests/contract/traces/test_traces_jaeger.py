"""Jaeger's query API, as its page and Grafana ask it: the shapes are held to schemas, the values to what was sent."""

import json
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from tests.contract.traces import shapes
from tests.contract.traces.conftest import Rig
from tests.unit.traces import made


def check(body: Any, schema: shapes.Schema) -> Any:
    """The body, when it has the shape."""
    jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)
    return body


async def test_a_trace(rig: Rig) -> None:
    """Times in microseconds, parents as CHILD_OF, links as FOLLOWS_FROM, one process a service with its instance,
    kinds and typed tags, events as logs."""
    sent = made.request(1, "write")
    await rig.export(sent)
    body = check(await rig.get(f"/api/traces/{sent.hex}"), shapes.envelope(shapes.TRACE))
    (trace,) = body["data"]
    spans = {span["operationName"]: span for span in trace["spans"]}
    root, copy, push = spans["pdserve.request"], spans["pdserve.kvd.copy"], spans["pdserve.kvd.push"]
    assert len(trace["spans"]) == sent.count
    assert (root["startTime"], root["references"]) == (made.START // 1000, [])
    assert root["duration"] == (made.total(made.WRITE) + 100 * made.MS + made.GAP) // 1000
    assert copy["references"] == [
        {"refType": "CHILD_OF", "traceID": sent.hex, "spanID": spans["pdserve.kv.wait"]["spanID"]},
        {"refType": "FOLLOWS_FROM", "traceID": sent.hex, "spanID": push["spanID"]},
    ]
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in root["tags"]}
    assert tags["span.kind"] == ("string", "server")
    assert tags["pdserve.ttft"] == ("float64", made.total(made.WRITE) / 1e9)
    assert tags["pdserve.kv.bytes"] == ("int64", 1 << 20)
    assert tags["gen_ai.response.finish_reasons"] == ("string", '["stop"]')
    assert "error" not in tags
    process = trace["processes"][copy["processID"]]
    assert process["serviceName"] == made.KVD
    assert {"key": "service.instance.id", "type": "string", "value": "pdserve-kvd-1"} in process["tags"]
    assert len(trace["processes"]) == 4
    (event,) = spans["pdserve.decode.stream"]["logs"]
    assert event["fields"][0] == {"key": "event", "type": "string", "value": "first_token"}
    assert event["timestamp"] == spans["pdserve.decode.stream"]["startTime"]


async def test_a_failed_span_wears_its_error(rig: Rig) -> None:
    """error=true makes Jaeger's badge; the cause is its description."""
    sent = made.failed(1, cause="no pair is left")
    await rig.export(sent)
    (trace,) = (await rig.get(f"/api/traces/{sent.hex}"))["data"]
    tags = {tag["key"]: tag["value"] for tag in trace["spans"][0]["tags"]}
    assert (tags["error"], tags["otel.status_code"]) == (True, "ERROR")
    assert (tags["otel.status_description"], tags["error.type"]) == ("no pair is left", "NO_ENGINES")


async def test_what_the_search_form_asks(rig: Rig) -> None:
    """Services, operations, and the traces that are meant."""
    await rig.export(made.request(1), made.failed(2, made.START + 10**9))
    services = check(await rig.get("/api/services"), shapes.envelope(shapes.TEXT))
    assert services["data"] == [made.DECODE, made.KVD, made.PREFILL, made.PROXY]
    assert services["total"] == 4
    names = check(await rig.get(f"/api/services/{made.KVD}/operations"), shapes.envelope(shapes.TEXT))
    assert names["data"] == ["pdserve.kvd.copy", "pdserve.kvd.resolve"]
    kinds = check(await rig.get(f"/api/operations?service={made.PROXY}"), shapes.envelope(shapes.OPERATION))
    assert {"name": "pdserve.attempt", "spanKind": "client"} in kinds["data"]
    everything = await rig.get(f"/api/traces?service={made.PROXY}&limit=20&lookback=1h")
    check(everything, shapes.envelope(shapes.TRACE))
    assert [trace["traceID"] for trace in everything["data"]] == [made.Made(2).hex, made.Made(1).hex]
    tags = quote(json.dumps({"error": "true"}))
    bad = await rig.get(f"/api/traces?service={made.PROXY}&operation=pdserve.request&tags={tags}&maxDuration=1s")
    assert [trace["traceID"] for trace in bad["data"]] == [made.Made(2).hex]
    both = await rig.get(f"/api/traces?traceID={made.Made(1).hex}&traceID={made.Made(9).hex}")
    assert [trace["traceID"] for trace in both["data"]] == [made.Made(1).hex]


async def test_the_picture_of_services(rig: Rig) -> None:
    """Who called whom, over the time asked for."""
    await rig.export(made.request(1))
    end = made.START // 10**6 + 1000
    found = await rig.get(f"/api/dependencies?endTs={end}&lookback=3600000")
    check(found, shapes.envelope(shapes.DEPENDENCY))
    assert {"parent": made.PROXY, "child": made.DECODE, "callCount": 6} in found["data"]
    assert (await rig.get(f"/api/dependencies?endTs={end - 3600_000}&lookback=1000"))["data"] == []


async def test_version_3_lists(rig: Rig) -> None:
    """Services, operations and summaries, nanoseconds as text, by the names that newer and older pages use."""
    await rig.export(made.request(1), made.failed(2, made.START + 10**9))
    services = check(await rig.get("/api/v3/services"), shapes.record(services=shapes.listed(shapes.TEXT)))
    assert made.KVD in services["services"]
    operations = await rig.get(f"/api/v3/operations?service={made.KVD}")
    check(operations, shapes.record(operations=shapes.listed(shapes.OPERATION)))
    assert operations["operations"][0] == {"name": "pdserve.kvd.copy", "spanKind": "internal"}
    for name in ("service_name", "serviceName"):
        found = await rig.get(f"/api/v3/trace-summaries?query.{name}={made.PROXY}")
        check(found, shapes.record(summaries=shapes.listed(shapes.SUMMARY)))
        bad, good = found["summaries"]
        assert (bad["errorSpanCount"], bad["spanCount"], bad["orphanSpanCount"]) == (2, 2, 0)
        assert (good["rootServiceName"], good["rootOperationName"]) == (made.PROXY, "pdserve.request")
        assert good["minStartTimeUnixNano"] == str(made.START)
        assert {"name": made.KVD, "spanCount": 2, "errorSpanCount": 0} in good["services"]
    at = "2023-11-14T22:13:20.5Z"  # between the two
    later = await rig.get(f"/api/v3/trace-summaries?query.service_name={made.PROXY}&query.start_time_min={at}")
    assert [one["traceId"] for one in later["summaries"]] == [made.Made(2).hex]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/traces/1234", 404, "trace not found"),
        ("/api/traces/xyz", 400, "not a trace id"),
        ("/api/traces", 400, "parameter 'service' is required"),
        ("/api/operations", 400, "parameter 'service' is required"),
        ("/api/traces?service=a&limit=0", 400, "limit=0"),
        ("/api/metrics/latencies?service=a&quantile=0.95", 501, "metrics querying is currently disabled"),
        ("/api/metrics/calls", 501, "disabled"),
        ("/api/metrics/errors", 501, "disabled"),
        ("/api/nothing", 404, "Not Found"),
    ],
)
async def test_what_it_cannot_answer_it_says(rig: Rig, path: str, status: int, says: str) -> None:
    """In Jaeger's form; the Monitor tab is told that there are no metrics rather than shown empty ones."""
    body = check(await rig.get(path, status), shapes.FAILURE)
    assert body["errors"][0]["code"] == status
    assert says in body["errors"][0]["msg"]


async def test_every_type_of_tag_has_its_shape(rig: Rig) -> None:
    """Also bytes, nested lists, a missing value and the largest integers."""
    trace = made.Made(5)
    trace.span("x", made.KVD, 0, 1).attributes.extend(
        made.pairs(
            {"a": b"\x00", "b": [1, [True]], "c": {"d": 1.5}, "e": (1 << 63) - 1, "f": float("nan"), "g": "\x00"}
        )
    )
    trace.spans[made.KVD][0].attributes.add(key="h")
    await rig.export(trace)
    body = check(await rig.get(f"/api/traces/{trace.hex}"), shapes.envelope(shapes.TRACE))
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in body["data"][0]["spans"][0]["tags"]}
    assert tags["a"] == ("binary", "AA==")
    assert tags["b"] == ("string", "[1, [true]]")
    assert tags["e"] == ("int64", (1 << 63) - 1)
    assert (tags["f"], tags["g"], tags["h"]) == (("string", "nan"), ("string", "\x00"), ("string", ""))
