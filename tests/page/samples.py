"""Answers of the traces API as its contract has them, made from parts: READ, WRITE, failed, retried, alone. Pure."""

import math
import random
from typing import Any

Json = dict[str, Any]

SEED = 20
START_US = 1_795_953_600_000_000.0
MODEL = "smollm2-135m"
READ_PARTS = {
    "tokenize": 0.00081,
    "admit": 0.000042,
    "route": 0.000095,
    "prefill.hop": 0.001204,
    "prefill.queue": 0.006331,
    "prefill.forward": 0.148207,
    "proxy.serialization": 0.013418,
    "decode.admit": 0.002117,
    "kv.wait": 0.031906,
    "decode.queue": 0.004402,
    "decode.first_step": 0.018833,
    "detokenize": 0.000377,
    "encode": 0.000518,
    "egress": 0.000233,
}
# The write runs beside prefill's forward: proxy serialization is gone and little of the wait is left.
WRITE_PARTS = READ_PARTS | {"proxy.serialization": 0.000004, "decode.admit": 0.0, "kv.wait": 0.003288}
ALONE_PARTS = {
    "tokenize": 0.0008,
    "admit": 0.00004,
    "route": 0.00008,
    "decode.hop": 0.0011,
    "decode.queue": 0.0052,
    "decode.first_step": 0.1563,
    "detokenize": 0.0004,
    "encode": 0.0005,
    "egress": 0.0002,
}
_PREFILL = ("prefill.queue", "prefill.forward")
_DECODE = ("decode.admit", "kv.wait", "decode.queue", "decode.first_step", "detokenize")


def trace_id(number: int) -> str:
    """32 hexadecimal digits."""
    return f"{0x4BF92F3577B34DA6 + number:032x}"


def request(number: int, mode: str = "read", **changed: Any) -> Json:
    """One row of /api/pdserve/requests; `changed` fields replace those that follow from the mode."""
    parts: dict[str, float] = {"read": READ_PARTS, "write": WRITE_PARTS, "none": ALONE_PARTS}[mode]
    parts = changed.get("parts", parts)
    unattributed = changed.get("unattributed", 0.000112)
    ttft = sum(parts.values()) + (unattributed or 0.0)
    handed_over = mode != "none"
    return {
        "trace_id": trace_id(number),
        "request_id": f"req-{0x9A3C51 + 977 * number:08x}",
        "start_us": START_US + number * 731_000.0,
        "ttft": ttft,
        "e2e": ttft + 1.284,
        "mode": mode,
        "transport": "shm" if handed_over else "",
        "model": MODEL,
        "outcome": "finished",
        "reason": "",
        "fallbacks": 0,
        "continuations": 0,
        "input_tokens": 2048,
        "output_tokens": 128,
        "kv_bytes": 47_185_920 if handed_over else 0,
        "parts": dict(parts),
        "unattributed": unattributed,
        "failed_after": None,
        "failed_in": "",
        "failed_or_later": [],
    } | changed


def many(count: int = 40) -> list[Json]:
    """A busy minute of all kinds, newest first."""
    rng = random.Random(SEED)
    rows = []
    for number in range(count):
        mode = rng.choice(("read", "read", "read", "write", "write", "none"))
        size = math.exp(rng.gauss(0, 0.35))
        base = {"read": READ_PARTS, "write": WRITE_PARTS, "none": ALONE_PARTS}[mode]
        parts = {name: seconds * size * math.exp(rng.gauss(0, 0.25)) for name, seconds in base.items()}
        changed: Json = {
            "parts": parts,
            "input_tokens": int(2048 * size),
            "output_tokens": rng.randint(8, 512),
            "kv_bytes": int(47_185_920 * size) if mode != "none" else 0,
        }
        if number in (7, 29):
            done = dict(list({name: parts.get(name, 0.004) for name in READ_PARTS}.items())[:9])
            changed |= {"outcome": "failed", "reason": "PEER_LOST", "ttft": None, "output_tokens": 0, "parts": done}
            after = sum(done.values())
            changed |= {"unattributed": 0.0, "kv_bytes": 0, "e2e": after, "failed_after": after, "failed_in": "kv.wait"}
            mode = "read"
        elif number == 18:
            changed |= {"outcome": "cancelled", "reason": "CANCELLED"}
        elif number in (12, 33):
            changed |= {"fallbacks": 1, "parts": {"tokenize": 0.0008, "retry": 0.09} | parts}
        elif number == 36:
            changed |= {"continuations": 1}
        rows.append(request(number, mode, **changed))
    return rows[::-1]


class _Spans:
    """Spans of one trace, added one after the other."""

    def __init__(self, start_us: float) -> None:
        self.start_us = start_us
        self.made: list[Json] = []

    def add(self, name: str, service: str, parent: str, begin: float, end: float, **more: Any) -> str:
        """A span from `begin` to `end`, seconds after the start; returns its id."""
        span_id = f"{len(self.made) + 0xA0:016x}"
        span = {
            "span_id": span_id,
            "parent_id": parent,
            "name": f"pdserve.{name}",
            "service": f"pdserve-{service}",
            "instance": {"prefill": "0b6c2d1e-prefill", "decode": "77e1f0aa-decode"}.get(service, service),
            "start_us": self.start_us + begin * 1e6,
            "duration_us": (end - begin) * 1e6,
            "status": "ok",
            "status_message": "",
            "attributes": {},
            "events": [],
            "links": [],
            "critical": True,
        }
        self.made.append(span | more)
        return span_id

    def event(self, name: str, at: float) -> Json:
        """An event `at` seconds after the start."""
        return {"name": name, "time_us": self.start_us + at * 1e6, "attributes": {}}


def _attributes(row: Json) -> Json:
    parts = row["parts"]
    said: Json = {
        "pdserve.request_id": row["request_id"],
        "pdserve.mode": row["mode"],
        "pdserve.outcome": row["outcome"],
        "pdserve.transport": row["transport"],
        "pdserve.fallbacks": row["fallbacks"],
        "pdserve.continuations": row["continuations"],
        "pdserve.kv.bytes": row["kv_bytes"],
        "pdserve.kv.blocks": 128,
        "pdserve.recomputed_tokens": 0,
        "pdserve.e2e": row["e2e"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": row["model"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": row["input_tokens"],
        "gen_ai.usage.output_tokens": row["output_tokens"],
    }
    kind = "ttft" if row["ttft"] is not None else "failed_after"
    said |= {f"pdserve.{kind}.{name}": seconds for name, seconds in parts.items()}
    if row["outcome"] != "finished":
        said |= {"error.type": row["reason"], "pdserve.error": "the prefill engine has gone"}
    if row["ttft"] is None:
        return said | {"pdserve.failed_after": row["failed_after"], "pdserve.failed_in": row["failed_in"]}
    raw = {
        "prefill.queue": parts.get("prefill.queue", 0.0),
        "prefill.forward": parts.get("prefill.forward", 0.0),
        "write": parts.get("kv.wait", 0.0),
        "kv.wait": parts.get("kv.wait", 0.0),
        "decode.admit": parts.get("decode.admit", 0.0),
        "decode.queue": parts["decode.queue"],
        "first_token": parts["decode.first_step"],
        "detokenize": parts["detokenize"],
        "encode": parts["encode"],
        "network": parts.get("prefill.hop", 0.0) + parts["egress"],
    }
    tail = raw["first_token"] + raw["detokenize"] + raw["encode"] + raw["network"]
    serialization = parts.get("proxy.serialization", 0.0)
    pushed = raw["prefill.queue"] + raw["prefill.forward"]
    waited = raw["decode.admit"] + raw["decode.queue"]
    said |= {f"pdserve.raw.{name}": seconds for name, seconds in raw.items()}
    said |= {
        "pdserve.ttft": row["ttft"],
        "pdserve.ttft.unattributed": row["unattributed"],
        "pdserve.ttft.rdma_wait": raw["kv.wait"],
        "pdserve.ttft.proxy_serialization": serialization,
        "pdserve.formula.read": pushed + serialization + raw["kv.wait"] + waited + tail,
        "pdserve.formula.write": max(pushed + raw["write"], waited) + tail,
    }
    return said


def _service(part: str) -> str:
    return "prefill" if part in _PREFILL else "decode" if part in _DECODE else "proxy"


def trace(row: Json, failed_attempt: str = "") -> Json:
    """/api/pdserve/trace/ID of a row; with the cause of an attempt that failed before it answered, if one did."""
    spans = _Spans(row["start_us"])
    end = row["e2e"]
    bad = row["outcome"] != "finished"
    status = {"status": "error", "status_message": f"{row['reason']}: the prefill engine has gone"} if bad else {}
    root = spans.add("request", "proxy", "", 0.0, end, attributes=_attributes(row), **status)
    at = 0.0
    parts = dict(row["parts"])
    for name in ("tokenize", "admit", "route"):
        seconds = parts.pop(name, 0.0)
        if seconds:
            spans.add(name, "proxy", root, at, at + seconds - 2e-6)
        at += seconds
    if retry := parts.pop("retry", 0.0):
        cause = {"status": "error", "status_message": failed_attempt, "critical": False}
        engines = {"pdserve.prefill.engine_id": "51ae90c2-prefill", "pdserve.decode.engine_id": "77e1f0aa-decode"}
        engines["pdserve.failed_in"] = "prefill.forward"
        first = spans.add("attempt", "proxy", root, at, at + retry - 2e-6, attributes=engines, **cause)
        spans.add("prefill.hop", "proxy", first, at, at + 0.0012, critical=False)
        spans.add("prefill.queue", "prefill", first, at + 0.0013, at + 0.03, critical=False)
        spans.add("prefill.forward", "prefill", first, at + 0.0301, at + retry - 2e-6, **cause)
        at += retry
    begin, stop = at, at + sum(parts.values())
    engines = {"pdserve.prefill.engine_id": "0b6c2d1e-prefill", "pdserve.decode.engine_id": "77e1f0aa-decode"}
    if row["failed_in"]:
        engines["pdserve.failed_in"] = row["failed_in"]
    attempt = spans.add("attempt", "proxy", root, begin, stop - 2e-6, attributes=engines, **status)
    for name, seconds in parts.items():
        if seconds <= 4e-6:
            at += seconds
            continue
        broken = status if name == row["failed_in"] else {}
        own = spans.add(name, _service(name), attempt, at, at + seconds - 2e-6, **broken)
        if broken:
            continue
        _below(spans, row, name, own, at, at + seconds - 2e-6)
        at += seconds
    if row["ttft"] is not None:
        first_token = spans.event("first_token", row["ttft"])
        spans.add("decode.stream", "decode", root, row["ttft"], end, events=[first_token])
    return {"trace_id": row["trace_id"], "request": row, "spans": spans.made}


def _below(spans: _Spans, row: Json, part: str, parent: str, begin: float, end: float) -> None:
    facts = {"pdserve.kv.bytes": row["kv_bytes"], "pdserve.kv.blocks": 128, "pdserve.transport": row["transport"]}
    if part == "prefill.forward" and row["mode"] == "write":
        spans.add("kvd.push", "kvd", parent, begin + 0.01, end - 0.002, attributes=facts, critical=False)
    if part == "kv.wait":
        length = end - begin
        pushed = [span["span_id"] for span in spans.made if span["name"] == "pdserve.kvd.push"]
        links = [{"trace_id": row["trace_id"], "span_id": span_id, "attributes": {}} for span_id in pushed]
        spans.add("kvd.resolve", "kvd", parent, begin, begin + 0.05 * length - 2e-6)
        spans.add("kvd.copy", "kvd", parent, begin + 0.05 * length, begin + 0.95 * length - 2e-6, attributes=facts)
        spans.add("kvd.notify", "kvd", parent, begin + 0.95 * length, end, links=links)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _totals(rows: list[Json]) -> Json:
    said: Json = {"count": len(rows)}
    names = sorted({name for row in rows for name in row["parts"]})
    for key, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        said[key] = {
            name: _quantile([row["parts"][name] for row in rows if name in row["parts"]], share) for name in names
        }
        if rows:
            said[key]["ttft"] = _quantile([row["ttft"] for row in rows], share)
    return said


def parts(mode: str = "", window: int = 3600, bucket: int = 60) -> Json:
    """/api/pdserve/parts: an hour with a slow quarter and a gap in which nothing came."""
    rng = random.Random(f"{SEED}{mode}")
    base = {"write": WRITE_PARTS, "none": ALONE_PARTS}.get(mode, READ_PARTS)
    buckets, everything = [], []
    for number in range(max(1, window // bucket)):
        slow = 1.9 if 34 <= number < 44 else 1.0
        rows = []
        for _ in range(0 if 20 <= number < 24 else rng.randint(6, 20)):
            shape = {name: seconds * math.exp(rng.gauss(0, 0.3)) for name, seconds in base.items()}
            shape["kv.wait"] = shape.get("kv.wait", 0.0) * slow
            shape = {name: seconds for name, seconds in shape.items() if name in base}
            rows.append({"parts": shape, "ttft": sum(shape.values())})
        everything += rows
        if rows:
            buckets.append({"start_us": START_US + number * bucket * 1e6} | _totals(rows))
    return {"parts": sorted(base), "buckets": buckets, "total": _totals(everything)}


def nothing() -> Json:
    """/api/pdserve/parts of a window in which nothing came."""
    return {"parts": [], "buckets": [], "total": {"count": 0, "p50": {}, "p90": {}, "p99": {}}}
