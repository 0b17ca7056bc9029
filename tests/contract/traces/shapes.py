"""JSON schemas of what Jaeger's pages expect; strict, so that a field too many is seen as well as one too few."""

from typing import Any

Schema = dict[str, Any]


def record(**fields: Schema) -> Schema:
    """An object with exactly these fields."""
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NANOSECONDS: Schema = {"type": "string", "pattern": "^[0-9]+$"}
TRACE_ID: Schema = {"type": "string", "pattern": "^(?!0+$)[0-9a-f]{32}$"}
SPAN_ID: Schema = {"type": "string", "pattern": "^(?!0+$)[0-9a-f]{16}$"}
NOTHING: Schema = {"type": "null"}
TAG: Schema = {
    "oneOf": [
        record(key=TEXT, type={"const": kind}, value=value)
        for kind, value in (
            ("string", TEXT),
            ("bool", {"type": "boolean"}),
            ("int64", {"type": "integer"}),
            ("float64", {"type": "number"}),
            ("binary", {"type": "string", "contentEncoding": "base64"}),
        )
    ]
}
REFERENCE = record(refType={"enum": ["CHILD_OF", "FOLLOWS_FROM"]}, traceID=TRACE_ID, spanID=SPAN_ID)
SPAN = record(
    traceID=TRACE_ID,
    spanID=SPAN_ID,
    operationName=TEXT,
    references=listed(REFERENCE),
    startTime=COUNT,
    duration=COUNT,
    tags=listed(TAG),
    logs=listed(record(timestamp=COUNT, fields=listed(TAG))),
    processID={"type": "string", "pattern": "^p[0-9]+$"},
    warnings=NOTHING,
)
TRACE = record(
    traceID=TRACE_ID,
    spans=listed(SPAN),
    processes={"type": "object", "additionalProperties": record(serviceName=TEXT, tags=listed(TAG))},
    warnings=NOTHING,
)
OPERATION = record(name=TEXT, spanKind=TEXT)
DEPENDENCY = record(parent=TEXT, child=TEXT, callCount=COUNT)
FAILURE = record(
    data=NOTHING,
    total=COUNT,
    limit=COUNT,
    offset=COUNT,
    errors={
        **listed({"type": "object", "required": ["code", "msg"], "properties": {"code": COUNT, "msg": TEXT}}),
        "minItems": 1,
    },
)
SUMMARY = record(
    traceId=TRACE_ID,
    traceID=TRACE_ID,
    rootServiceName=TEXT,
    rootOperationName=TEXT,
    minStartTimeUnixNano=NANOSECONDS,
    maxEndTimeUnixNano=NANOSECONDS,
    spanCount=COUNT,
    errorSpanCount=COUNT,
    orphanSpanCount=COUNT,
    services=listed(record(name=TEXT, spanCount=COUNT, errorSpanCount=COUNT)),
)


def envelope(item: Schema) -> Schema:
    """Version 1's good answer with a list of these."""
    return record(data=listed(item), total=COUNT, limit=COUNT, offset=COUNT, errors=NOTHING)


NUMBER: Schema = {"type": "number"}
MAYBE: Schema = {"type": ["number", "null"]}
PARTS: Schema = {"type": "object", "additionalProperties": NUMBER}
REQUEST = record(
    trace_id=TRACE_ID,
    request_id=TEXT,
    start_us=NUMBER,
    ttft=MAYBE,
    e2e=MAYBE,
    mode=TEXT,
    transport=TEXT,
    model=TEXT,
    outcome=TEXT,
    reason=TEXT,
    fallbacks=COUNT,
    continuations=COUNT,
    input_tokens=COUNT,
    output_tokens=COUNT,
    kv_bytes=COUNT,
    parts=PARTS,
    unattributed=MAYBE,
    failed_after=MAYBE,
    failed_in=TEXT,
    failed_or_later=listed(TEXT),
)
OUR_SPAN = record(
    span_id=SPAN_ID,
    parent_id={"type": "string", "pattern": "^([0-9a-f]{16})?$"},
    name=TEXT,
    service=TEXT,
    instance=TEXT,
    kind=TEXT,
    start_us=NUMBER,
    duration_us=NUMBER,
    status={"enum": ["unset", "ok", "error"]},
    status_message=TEXT,
    attributes={"type": "object"},
    events=listed(record(name=TEXT, time_us=NUMBER, attributes={"type": "object"})),
    links=listed(record(trace_id=TRACE_ID, span_id=SPAN_ID, attributes={"type": "object"})),
    critical={"type": "boolean"},
)
_PERCENTILES = {"count": COUNT, "p50": PARTS, "p90": PARTS, "p99": PARTS}
OUR_REQUESTS = record(requests=listed(REQUEST))
OUR_TRACE = record(trace_id=TRACE_ID, request={"oneOf": [REQUEST, NOTHING]}, spans=listed(OUR_SPAN))
OUR_PARTS = record(
    parts=listed(TEXT), buckets=listed(record(start_us=COUNT, **_PERCENTILES)), total=record(**_PERCENTILES)
)
