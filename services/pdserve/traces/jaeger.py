"""Spans in the shapes of Jaeger's query API, v1 and the parts of v3 that its page asks for. Pure.

Shapes and names of tags are Jaeger 2's for spans that came by OTLP; times are whole microseconds.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pdserve.traces.search import derived
from pdserve.traces.span import BYTES, ERROR, Attributes, Origin, Span

Json = dict[str, Any]


def envelope(data: Any, *, total: int = 0, limit: int = 0) -> Json:
    """A good answer."""
    return {"data": data, "total": total, "limit": limit, "offset": 0, "errors": None}


def failure(code: int, message: str, trace_id: str = "") -> Json:
    """A bad one."""
    error: Json = {"code": code, "msg": message}
    if trace_id:
        error["traceID"] = trace_id
    return {"data": None, "total": 0, "limit": 0, "offset": 0, "errors": [error]}


def trace(spans: Sequence[Span]) -> Json:
    """One trace; its spans must share a trace id."""
    processes: dict[str, Json] = {}
    numbers: dict[str, str] = {}
    found = []
    for span in spans:
        process = _process(span.origin)
        key = json.dumps(process, sort_keys=True)
        if key not in numbers:
            numbers[key] = f"p{len(numbers) + 1}"
            processes[numbers[key]] = process
        found.append(_span(span, numbers[key]))
    return {"traceID": spans[0].trace_id, "spans": found, "processes": processes, "warnings": None}


def tag(key: str, value: Any) -> Json:
    """One tag with its type; lists and maps become JSON text."""
    match value:
        case bool():
            return {"key": key, "type": "bool", "value": value}
        case int():
            return {"key": key, "type": "int64", "value": value}
        case float():
            return {"key": key, "type": "float64", "value": value}
        case str():
            return {"key": key, "type": "string", "value": value}
        case None:
            return {"key": key, "type": "string", "value": ""}
        case dict() if value.keys() == {BYTES}:
            return {"key": key, "type": "binary", "value": value[BYTES]}
        case _:
            return {"key": key, "type": "string", "value": json.dumps(value, ensure_ascii=False)}


def dependency(parent: str, child: str, calls: int) -> Json:
    """One arrow of the picture of services."""
    return {"parent": parent, "child": child, "callCount": calls}


def summary(spans: Sequence[Span]) -> Json:
    """One trace in a list, as v3 has it."""
    here = {span.span_id for span in spans}
    orphans = [span for span in spans if span.parent_id and span.parent_id not in here]
    root = next((span for span in spans if not span.parent_id), spans[0])
    services: dict[str, list[int]] = {}
    for span in spans:
        counts = services.setdefault(span.origin.service, [0, 0])
        counts[0] += 1
        counts[1] += span.status == ERROR
    return {
        "traceId": root.trace_id,
        "traceID": root.trace_id,  # what pages before 2.2 read
        "rootServiceName": root.origin.service,
        "rootOperationName": root.name,
        "minStartTimeUnixNano": str(min(span.start_ns for span in spans)),
        "maxEndTimeUnixNano": str(max(span.end_ns for span in spans)),
        "spanCount": len(spans),
        "errorSpanCount": sum(span.status == ERROR for span in spans),
        "orphanSpanCount": len(orphans),
        "services": [
            {"name": name, "spanCount": count, "errorSpanCount": errors}
            for name, (count, errors) in sorted(services.items())
        ],
    }


def _span(span: Span, process: str) -> Json:
    references = []
    if span.parent_id:
        references.append({"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_id})
    references += [{"refType": "FOLLOWS_FROM", "traceID": link.trace_id, "spanID": link.span_id} for link in span.links]
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": references,
        "startTime": span.start_us,
        "duration": span.duration_us,
        "tags": _tags({**span.tags, **derived(span)}),
        "logs": [
            {"timestamp": event.time_ns // 1000, "fields": _tags({"event": event.name, **event.attributes})}
            for event in span.events
        ],
        "processID": process,
        "warnings": None,
    }


def _process(origin: Origin) -> Json:
    tags = {key: value for key, value in origin.resource.items() if key != "service.name"}
    return {"serviceName": origin.service, "tags": _tags(tags)}


def _tags(attributes: Attributes) -> list[Json]:
    return [tag(key, value) for key, value in attributes.items()]


def operations(found: Iterable[tuple[str, str]]) -> list[Json]:
    """Names of spans with their kinds."""
    return [{"name": name, "spanKind": kind} for name, kind in found]
