"""A trace as lines of text: header, one line a span with a bar to scale, and the parts that sum to the TTFT. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

from pdserve.cli import rounding, text

Json = dict[str, Any]

TITLES = {"proxy.serialization": "proxy serialization", "kv.wait": "RDMA wait (kv.wait)"}
"""The two parts that people look for, as they name them."""
_MODES = ("read", "write")
_CANCELLED = "CANCELLED"
_LEAST_BAR = 10
_RESET, _BOLD, _DIM, _RED, _YELLOW = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m"


@dataclass(frozen=True, slots=True)
class Style:
    """What the terminal can show."""

    width: int = 80
    colour: bool = False
    blocks: bool = True
    """Whether it has block characters; else # and -."""

    @classmethod
    def of(cls, out: TextIO, width: int) -> "Style":
        """What a stream takes."""
        return cls(width, colour=out.isatty(), blocks=(out.encoding or "").lower().replace("-", "") == "utf8")

    def paint(self, words: str, colour: str) -> str:
        """In a colour, where there are any."""
        return f"{colour}{words}{_RESET}" if self.colour and words else words


def picture(trace: Json, style: Style, *, whole: bool = False, parts: bool = True) -> list[str]:
    """Everything about one request, or without the table of `parts`; `whole`: bars go to the end, not only to the
    first token."""
    request, spans = trace["request"] or {}, trace["spans"]
    drawn = [*_header(trace, style), "", *_waterfall(spans, style, None if whole else request.get("ttft"))]
    return [*drawn, *_parts(request, _formula(spans, request), style)] if parts else drawn


def listing(requests: Sequence[Json], *, whole_ids: bool = False) -> str:
    """The newest requests, one a line; times in milliseconds."""
    header = ("trace", "time", "request", "mode", "outcome", "in", "out", "TTFT ms", "proxy serialization", "RDMA wait")
    rows = [
        (
            row["trace_id"] if whole_ids else row["trace_id"][:12],
            _when(row["start_us"], "%H:%M:%S"),
            clean(row["request_id"]),
            clean(row["mode"]),
            clean(row["reason"] or row["outcome"]) + (f" in {place(row)}" if row["failed_in"] else ""),
            str(row["input_tokens"]),
            str(row["output_tokens"]),
            _ms(row["ttft"]),
            _part_ms(row, "proxy.serialization"),
            _part_ms(row, "kv.wait"),
        )
        for row in requests
    ]
    return text.table(header, rows, left=5) if rows else "no request has been traced"


def clean(said: str) -> str:
    """Without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in said)


def place(row: Json, names: Mapping[str, str] | None = None) -> str:
    """Where a request without a first token ended, by the part's name or as `names` calls it; `or later`, where nobody
    has seen the end of that part."""
    part = clean(row["failed_in"])
    return (names or {}).get(part, part) + (" or later" if row.get("failed_or_later") else "")


def _header(trace: Json, style: Style) -> Iterator[str]:
    request = trace["request"]
    if request is None:
        yield f"trace {trace['trace_id']}: no request of pdserve's"
        return
    yield style.paint(f"request {clean(request['request_id'])}", _BOLD)
    yield f"trace   {trace['trace_id']}, {_when(request['start_us'], '%Y-%m-%d %H:%M:%S')}"
    mode = _mode(trace)
    facts = [mode.upper() if mode in _MODES else "one engine alone"]
    if request["transport"]:
        facts[0] += f" over {clean(request['transport'])}"
    if request["kv_bytes"]:
        facts.append(f"KV {text.size(request['kv_bytes'])}")
    facts.append(f"{request['input_tokens']} tokens in, {request['output_tokens']} out")
    facts += [
        f"{n} {name}{'s' if n > 1 else ''}" for name in ("fallback", "continuation") if (n := request[f"{name}s"])
    ]
    yield f"        {', '.join([*facts, clean(request['model'])])}"
    total = "" if request["e2e"] is None else f", {_ms(request['e2e'])} ms in all"
    first = "no first token" if request["ttft"] is None else f"TTFT {_ms(request['ttft'])} ms"
    yield f"        {first}{total}"
    outcome = clean(request["outcome"])
    paint = "" if outcome == "cancelled" else _RED  # that a client leaves is no failure
    if outcome != "finished":
        why = next((span["status_message"] for span in trace["spans"] if span["name"] == "pdserve.request"), "")
        reason = clean(request["reason"])
        cause = clean(why).removeprefix(f"{reason}: ")  # a status begins with it too
        yield style.paint(": ".join(filter(None, (outcome, reason, cause))), paint)
    if request["failed_in"]:
        yield style.paint(f"in {place(request, TITLES)}, after {_ms(request['failed_after'])} ms", paint)
    elif outcome != "finished" and request["ttft"] is not None:
        yield style.paint(f"in decode.stream, after {_ms(request['e2e'])} ms", paint)


def _mode(trace: Json) -> str:
    """Of the request; where it ended on one engine alone, that of the first pair that it was on."""
    mode = str(trace["request"]["mode"])
    if mode == "none" and trace["request"]["outcome"] != "finished":
        tried = (span["attributes"] for span in trace["spans"] if span["name"] == "pdserve.attempt")
        mode = next((str(said["pdserve.mode"]) for said in tried if said.get("pdserve.mode") in _MODES), mode)
    return clean(mode)


def _waterfall(spans: Sequence[Json], style: Style, until_s: float | None) -> Iterator[str]:
    rows, by_id = list(_tree(spans)), {span["span_id"]: span for span in spans}
    begin = min(span["start_us"] for span in spans)
    end = max(span["start_us"] + span["duration_us"] for span in spans)
    if until_s is not None:
        root = next((span for span in spans if span["name"] == "pdserve.request"), rows[0][1])
        end = root["start_us"] + until_s * 1e6
    labels = ["  " * depth + clean(span["name"]).removeprefix("pdserve.") for depth, span in rows]
    times = [_ms(span["duration_us"] / 1e6) for _, span in rows]
    services = [clean(span["service"]) for _, span in rows]
    left, middle, right = (max(map(len, column)) for column in (labels, times, services))
    room = style.width - left - middle - right - len("  |  ms  ") - 2
    bar = max(_LEAST_BAR, room)
    for (_, span), label, time, service in zip(rows, labels, times, services, strict=True):
        ended = span["status"] == "error"
        failed = ended and not _was_cancelled(span)
        drawn = style.paint(_bar(span, begin, end, bar, style), _RED if failed else "" if span["critical"] else _DIM)
        looked_for = label.strip() in TITLES
        name = style.paint(f"{label:<{left}}", _RED if failed else _YELLOW if looked_for else "")
        yield f"{name}  |{drawn}|{time:>{middle + 1}} ms  {service}".rstrip()
        if ended and span["parent_id"] and (why := _cause(span, by_id.get(span["parent_id"]))):
            depth = len(label) - len(label.lstrip())
            yield style.paint(f"{' ' * depth}  {'!' if failed else '-'} {why}", _RED if failed else "")
    full, thin = ("█", "░") if style.blocks else ("#", "-")
    cut = ", > goes on after the first token" if until_s is not None else ""
    yield style.paint(f"{full} on the critical path, {thin} beside it{cut}", _DIM)


def _cause(span: Json, parent: Json | None) -> str:
    """Why it ended early. Of the part that an attempt failed in: that it is this one, as the attempt says why; and what
    of that nobody has stamped."""
    why = clean(span["status_message"])
    if parent is None or parent["name"] != "pdserve.attempt" or parent["status_message"] != span["status_message"]:
        return why
    said = "cancelled here" if _was_cancelled(span) else "it failed here"
    if later := _list(span, "pdserve.failed_in.or_later"):
        said += f", or later: {later} (nobody has stamped that)"
    if never := _list(span, "pdserve.unstamped"):
        said += f"; not stamped before: {never}"
    return said


def _was_cancelled(span: Json) -> bool:
    """Whether its client left: it ended then, and nothing failed."""
    return str(span["status_message"]).partition(":")[0] == _CANCELLED


def _list(span: Json, name: str) -> str:
    value = span["attributes"].get(name)
    return ", ".join(clean(str(each)) for each in value) if isinstance(value, list) else ""


def _bar(span: Json, begin: float, end: float, width: int, style: Style) -> str:
    """A span's place between begin and end; at least one character, wherever it is."""
    scale = width / max(end - begin, 1e-3)
    first = (span["start_us"] - begin) * scale
    last = first + span["duration_us"] * scale
    goes_on = last > width + 0.5
    at = min(max(int(first), 0), width - 1)
    size = max(1, min(round(last), width) - at)
    full, thin = ("█", "░") if style.blocks else ("#", "-")
    drawn = (full if span["critical"] else thin) * size
    return f"{' ' * at}{drawn[:-1] + '>' if goes_on else drawn}".ljust(width)


def _tree(spans: Sequence[Json]) -> Iterator[tuple[int, Json]]:
    """Each span with its depth, parents before children, children by start; each once."""
    here = {span["span_id"] for span in spans}
    children: dict[str, list[Json]] = {}
    for span in sorted(spans, key=lambda span: span["start_us"]):
        children.setdefault(span["parent_id"] if span["parent_id"] in here else "", []).append(span)
    stack = [(0, span) for span in reversed(children.get("", []))]
    seen: set[str] = set()
    while stack:
        depth, span = stack.pop()
        if span["span_id"] in seen:
            continue
        seen.add(span["span_id"])
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(children.get(span["span_id"], []))]


def _parts(request: Json, formula: float | None, style: Style) -> Iterator[str]:
    """The table of parts, of the TTFT or, in its place, of the time until it failed."""
    failed_in = request["failed_in"] if request else ""
    whole = request["failed_after"] if failed_in else request["ttft"] if request else None
    if whole is None:
        return
    ended = "cancelled" if request["outcome"] == "cancelled" else "failed"
    paint = "" if ended == "cancelled" else _RED
    total_name, share = (f"{ended} after", "of all") if failed_in else ("TTFT", "of TTFT")
    shares, total = rounding.of_request(request), rounding.microseconds(whole)
    if failed_in in shares:  # the last, whatever it is called
        shares[failed_in] = shares.pop(failed_in)
    rows = [
        (_title(name, request, ended), rounding.milliseconds(us), f"{us / total:.1%}" if total else "")
        for name, us in shares.items()
    ]
    lines = text.table(("part", "ms", share), [*rows, (total_name, rounding.milliseconds(total), "")]).splitlines()
    yield ""
    yield from lines[:2]
    for name, line in zip(shares, lines[2:-1], strict=True):
        yield style.paint(line, paint if name == failed_in else _YELLOW + _BOLD if name in TITLES else "")
    yield lines[1]
    yield style.paint(lines[-1], _BOLD)
    if (summed := sum(shares.values())) != total:
        yield style.paint(f"the parts sum to {rounding.milliseconds(summed)} ms, not to the {total_name}", _RED)
    if formula is not None:
        yield f"{clean(request['mode']).upper()}'s formula on the raw intervals: {_ms(formula)} ms"


def _title(name: str, request: Json, ended: str) -> str:
    if name != request["failed_in"]:
        return TITLES.get(name, name)
    return f"{place(request, TITLES)}, until it {'was ' if ended == 'cancelled' else ''}{ended}"


def _formula(spans: Sequence[Json], request: Json) -> float | None:
    """What the request's span says that the formula of its mode gives."""
    root = next((span for span in spans if span["name"] == "pdserve.request"), None)
    value = root["attributes"].get(f"pdserve.formula.{request.get('mode')}") if root else None
    return float(value) if isinstance(value, (int, float)) else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else rounding.milliseconds(rounding.microseconds(seconds))


def _part_ms(row: Json, name: str) -> str:
    """Of one part as the table has it; of a request without a first token it is none of a TTFT."""
    missing = row["failed_in"] or name not in row["parts"]
    return "-" if missing else rounding.milliseconds(rounding.of_request(row)[name])


def _when(microseconds: float, form: str) -> str:
    return datetime.fromtimestamp(microseconds / 1e6).astimezone().strftime(form)
