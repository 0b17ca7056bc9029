"""OTLP's messages become spans; what breaks the rules is counted and named."""

import math

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from pdserve.traces import otlp, requests
from pdserve.traces.span import BYTES, ERROR
from tests.unit.traces import made


def test_a_span_keeps_everything_it_said() -> None:
    """Ids, times to the nanosecond, kind, status, every type of attribute, events, links, its resource."""
    trace = made.Made(7)
    given = {
        "text": "é", "yes": True, "int": 1 << 60, "float": 0.5, "list": [1, "a"], "map": {"k": [False]},
        "raw": b"\x00\xff", "infinite": math.inf,
    }  # fmt: skip
    one = trace.span("x", made.KVD, 1, 1003, kind=3)
    one.attributes.extend(made.pairs(given))
    one.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="why"))
    one.events.add(time_unix_nano=made.START + 5, name="first_token", attributes=made.pairs({"index": 3}))
    one.links.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8)
    child = trace.span("y", made.KVD, 2, 3, one)
    batch = otlp.decode(trace.export())
    assert not batch.refused
    first, second = batch.spans
    assert (first.trace_id, first.span_id, first.parent_id) == (trace.hex, one.span_id.hex(), "")
    assert second.parent_id == first.span_id
    assert (first.start_ns, first.end_ns, first.duration_us) == (made.START + 1, made.START + 1003, 1)
    assert (first.kind, first.status, first.message) == (3, ERROR, "why")
    assert first.tags == given | {"raw": {BYTES: "AP8="}, "infinite": "inf"}
    assert (first.events[0].name, first.events[0].time_ns) == ("first_token", made.START + 5)
    assert (first.links[0].trace_id, first.links[0].span_id) == ("01" * 16, "02" * 8)
    assert (first.origin.service, first.origin.instance) == (made.KVD, "pdserve-kvd-1")
    assert second.span_id == child.span_id.hex()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trace_id": b""}, "trace_id is not 16 bytes"),
        ({"trace_id": bytes(16)}, "trace_id is not 16 bytes, or all zero"),
        ({"span_id": b"\x01" * 7}, "span_id is not 8 bytes"),
        ({"parent_span_id": b"\x01" * 4}, "parent_span_id is not 8 bytes"),
        ({"start_time_unix_nano": 0}, "no start"),
        ({"end_time_unix_nano": 1}, "ends before it"),
        ({"end_time_unix_nano": 1 << 63}, "after the year 2262"),
        ({"name": "x" * otlp.MAX_SPAN_BYTES}, "more than 65536 bytes"),
        ({"links": [Span.Link(trace_id=b"\x01", span_id=b"\x01" * 8)]}, "a link's trace_id"),
    ],
)
def test_what_breaks_the_rules_is_refused_by_name(fields: dict[str, object], says: str) -> None:
    """One bad span is counted with its reason, and its neighbours are taken."""
    trace = made.Made(1)
    good = trace.span("good", made.PROXY, 0, 1)
    bad = trace.span("bad", made.PROXY, 0, 1)
    bad.MergeFrom(Span(**fields))  # type: ignore[arg-type]  # fields of all types
    for name, value in fields.items():  # MergeFrom passes over zeros
        if not value:
            bad.ClearField(name)  # type: ignore[arg-type]
    batch = otlp.decode(trace.export())
    assert [span.span_id for span in batch.spans] == [good.span_id.hex()]
    assert batch.refused.total() == 1
    assert says in otlp.why(batch.refused)


def test_a_resource_that_is_too_large_is_refused_with_all_its_spans() -> None:
    """Spans share their resource: one that is large could fill the store with little."""
    trace = made.Made(1)
    trace.span("a", made.PROXY, 0, 1)
    trace.span("b", made.PROXY, 0, 1)
    request = trace.export()
    request.resource_spans[0].resource.attributes.extend(made.pairs({"x": "y" * otlp.MAX_ORIGIN_BYTES}))
    batch = otlp.decode(request)
    assert (len(batch.spans), batch.refused.total()) == (0, 2)


def test_a_resource_without_a_name_is_called_as_jaeger_calls_it() -> None:
    """Spans of a nameless service can be found."""
    request = made.request().export()
    del request.resource_spans[0].resource.attributes[:]
    assert otlp.decode(request).spans[0].origin.service == "OTLPResourceNoServiceName"


def test_an_empty_export_is_none() -> None:
    """Nothing comes of nothing."""
    batch = otlp.decode(ExportTraceServiceRequest())
    assert (batch.spans, batch.refused.total()) == ((), 0)


def test_the_requests_span_becomes_a_row() -> None:
    """Columns come from the root's attributes; parts are in the order of passing and sum with the rest to the TTFT."""
    (row,) = [row for span in otlp.decode(made.request(retried=True).export()).spans if (row := requests.of(span))]
    assert (row.request_id, row.mode, row.transport, row.model, row.outcome) == (
        "cmpl-1", "read", "shm", "m", "finished",
    )  # fmt: skip
    assert (row.input_tokens, row.output_tokens, row.kv_bytes, row.fallbacks) == (64, 16, 1 << 20, 1)
    assert list(row.parts) == [*(n for n, *_ in made.HEAD), "retry", *(n for n, *_ in made.READ)]
    assert row.unattributed == 0.0
    assert row.ttft is not None
    assert round(sum(row.parts.values()) * 1e9) == round(row.ttft * 1e9)


def test_nonsense_in_a_requests_attributes_costs_only_that_column() -> None:
    """Whoever exports may write anything: a text where a number belongs is no number, and stops nothing."""
    trace = made.Made(1)
    trace.span(
        "request", made.PROXY, 0, made.MS, pdserve__ttft="soon", pdserve__fallbacks=True, pdserve__mode=3,
        pdserve__ttft__tokenize="x", pdserve__ttft__egress=1, gen_ai__usage__input_tokens=1.5,
    )  # fmt: skip
    row = requests.of(otlp.decode(trace.export()).spans[0])
    assert row is not None
    assert (row.ttft, row.fallbacks, row.mode, row.input_tokens) == (None, 0, "", 0)
    assert row.parts == {"egress": 1.0}
    assert row.e2e == 0.001
