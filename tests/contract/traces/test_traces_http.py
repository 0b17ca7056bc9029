"""Our own API and the page."""

from typing import Any

import jsonschema
import pytest

from pdserve.traces import page_files
from tests.contract.traces import shapes
from tests.contract.traces.conftest import Rig
from tests.unit.traces import made


def check(body: Any, schema: shapes.Schema) -> Any:
    """The body, when it has the shape."""
    jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)
    return body


async def test_the_newest_requests(rig: Rig) -> None:
    """Newest first, as many as asked for, filtered."""
    second = 10**9
    await rig.export(
        made.request(1), made.request(2, "write", made.START + second), made.failed(3, made.START + 2 * second)
    )
    rows = check(await rig.get("/api/pdserve/requests"), shapes.OUR_REQUESTS)["requests"]
    assert [row["request_id"] for row in rows] == ["cmpl-3", "cmpl-2", "cmpl-1"]
    assert (rows[0]["outcome"], rows[0]["reason"], rows[0]["ttft"], rows[0]["parts"]) == (
        "failed",
        "NO_ENGINES",
        None,
        {},
    )
    assert rows[2]["start_us"] == made.START / 1000
    parts = rows[2]["parts"]
    assert round(sum(parts.values()) * 1e9) + rows[2]["unattributed"] == round(rows[2]["ttft"] * 1e9)
    for query, expected in (
        ("limit=1", ["cmpl-3"]), ("mode=write", ["cmpl-2"]), ("outcome=failed", ["cmpl-3"]), ("model=x", []),
        ("id=cmpl-1", ["cmpl-1"]), (f"id={made.Made(2).hex}", ["cmpl-2"]), ("mode=&outcome=&model=&limit=", None),
    ):  # fmt: skip
        found = (await rig.get(f"/api/pdserve/requests?{query}"))["requests"]
        assert [row["request_id"] for row in found] == (
            expected or ([] if expected == [] else ["cmpl-3", "cmpl-2", "cmpl-1"])
        )


async def test_one_trace(rig: Rig) -> None:
    """Every span with its place, whether it is critical, its link and its error; beside the request's row."""
    sent = made.request(1, "write", retried=True)
    await rig.export(sent)
    body = check(await rig.get(f"/api/pdserve/trace/{sent.hex}"), shapes.OUR_TRACE)
    assert body["request"]["request_id"] == "cmpl-1"
    spans = {span["name"]: span for span in body["spans"]}
    assert len(body["spans"]) == sent.count
    wait, copy = spans["pdserve.kv.wait"], spans["pdserve.kvd.copy"]
    assert (copy["parent_id"], copy["service"], copy["instance"]) == (wait["span_id"], made.KVD, "pdserve-kvd-1")
    assert copy["links"][0]["span_id"] == spans["pdserve.kvd.push"]["span_id"]
    assert (copy["critical"], spans["pdserve.prefill.forward"]["critical"]) == (True, True)
    attempts = [span for span in body["spans"] if span["name"] == "pdserve.attempt"]
    assert [(span["status"], span["status_message"]) for span in attempts] == [
        ("error", "prefill gave up"),
        ("unset", ""),
    ]
    assert wait["duration_us"] == (0.9 * made.MS - made.GAP) / 1000


async def test_a_trace_by_its_requests_id(rig: Rig) -> None:
    """As people write it; of several requests in one trace the one that is called; all traces that it may be."""
    first, second, third = made.request(1), made.request(2, "write", made.START + 1), made.request(3)
    for span in (span for spans in second.spans.values() for span in spans):
        span.trace_id = first.trace_id
    await rig.export(first, second, third)
    for called, request, trace in (
        ("cmpl-2", "cmpl-2", first), ("%20CMPL-1", "cmpl-1", first), (first.hex.upper(), "cmpl-1", first),
        ("chatcmpl-cmpl-3", "cmpl-3", third),
    ):  # fmt: skip
        body = check(await rig.get(f"/api/pdserve/trace/{called}"), shapes.OUR_TRACE)
        assert (body["request"]["request_id"], body["trace_id"]) == (request, trace.hex)
    said = check(await rig.get(f"/api/pdserve/trace/{first.hex[:9]}", 400), shapes.FAILURE)["errors"][0]["msg"]
    assert first.hex in said
    assert third.hex in said


async def test_a_failure_says_how_sure_its_place_is(rig: Rig) -> None:
    """In the list and in the trace."""
    await rig.export(made.broken(1), made.request(2))
    rows = check(await rig.get("/api/pdserve/requests"), shapes.OUR_REQUESTS)["requests"]
    assert {row["request_id"]: row["failed_or_later"] for row in rows} == {"cmpl-1": ["decode.queue"], "cmpl-2": []}
    body = check(await rig.get("/api/pdserve/trace/cmpl-1"), shapes.OUR_TRACE)
    assert body["request"]["failed_or_later"] == ["decode.queue"]


async def test_a_trace_of_others_has_no_request(rig: Rig) -> None:
    """It is a trace all the same."""
    trace = made.Made(8)
    trace.span("kvd.copy", made.KVD, 0, 1)
    await rig.export(trace)
    assert check(await rig.get(f"/api/pdserve/trace/{trace.hex}"), shapes.OUR_TRACE)["request"] is None


async def test_the_parts_over_time(rig: Rig) -> None:
    """Buckets within the window; only what had a first token counts."""
    minute = 60 * 10**9
    sent = [made.request(n, start=made.START - n * minute) for n in range(4)]
    await rig.export(*sent, made.request(9, "write", made.START - 1), made.failed(10))
    body = check(await rig.get("/api/pdserve/parts?window=180&bucket=60&mode=read"), shapes.OUR_PARTS)
    assert body["parts"] == [name for name, *_ in (*made.HEAD, *made.READ)]
    assert [bucket["count"] for bucket in body["buckets"]] == [1, 1, 1]  # the clock is a minute on: the fourth is out
    assert body["total"]["count"] == 3
    assert body["total"]["p50"]["ttft"] == pytest.approx(made.total(made.READ) / 1e9, abs=1e-12)
    assert (await rig.get("/api/pdserve/parts?window=180"))["total"]["count"] == 4
    assert (await rig.get("/api/pdserve/parts?window=1"))["total"] == {"count": 0, "p50": {}, "p90": {}, "p99": {}}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("trace/1234", 404, "trace not found"),
        ("trace/zz", 404, "trace not found"),
        ("requests?limit=x", 400, "limit=x"),
        ("requests?limit=10001", 400, "from 1 to 10000"),
        ("parts?window=0", 400, "window=0"),
        ("parts?window=86400&bucket=1", 400, "at most 2000 buckets"),
        ("parts?window=60&bucket=61", 400, "bucket=61"),
    ],
)
async def test_what_it_cannot_answer_it_says(rig: Rig, path: str, status: int, says: str) -> None:
    """With a sentence that names the parameter."""
    assert says in check(await rig.get(f"/api/pdserve/{path}", status), shapes.FAILURE)["errors"][0]["msg"]


async def test_the_page_is_served_and_kept_in(rig: Rig) -> None:
    """Every file of the folder with its type; the policy lets nothing in from outside, on errors and answers too."""
    files = page_files.load()
    assert {"/", "/index.html", "/app.js", "/style.css"} <= files.keys()
    for path, file in files.items():
        async with rig.http.get(rig.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, file.content)
            assert answer.headers["Content-Type"] == file.type
    for path in ("/", "/api/services", "/api/nothing"):
        async with rig.http.get(rig.url + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "http" not in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:16686", 200), ("192.168.1.7", 200), ("evil.example", 400)],
)
async def test_another_sites_page_cannot_read_it(rig: Rig, host: str, status: int) -> None:
    """A name that somebody points at 127.0.0.1 is refused: a browser would take the answers for that site's own."""
    await rig.get("/api/services", status, Host=host)
