"""The waterfall in the terminal: what stands where, that its numbers sum, and that nothing in a trace is obeyed."""

import http.server
import json
import re
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import trace as trace_command
from pdserve.cli.__main__ import main
from pdserve.cli.waterfall import Style, listing, picture
from pdserve.proxy.__main__ import EXPORT_DELAY
from pdserve.rpc.errors import InvalidRequest
from pdserve.traces import answers, otlp, requests
from tests.unit.traces import made

PLAIN = Style(width=100, blocks=False)


def told(trace: made.Made) -> dict[str, Any]:
    """What the trace store says of it."""
    spans = otlp.decode(trace.export()).spans
    rows = [row for span in spans if (row := requests.of(span)) is not None]
    body: dict[str, Any] = json.loads(json.dumps(answers.trace(trace.hex, rows, spans)))
    return body


def bars(lines: list[str]) -> dict[str, str]:
    """Bars by the name before them."""
    found = [re.match(r" *(\S+) +\|(.*)\| +[\d.]+ ms", line) for line in lines]
    return {one[1]: one[2] for one in found if one}


def table(lines: list[str]) -> dict[str, float]:
    """Milliseconds by part."""
    begin = next(n for n, line in enumerate(lines) if line.startswith("part "))
    found = [re.match(r"(.+?)  +([\d.]+)( |$)", line) for line in lines[begin + 2 :]]
    return {one[1]: float(one[2]) for one in found if one}


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_request_explains_itself(mode: str) -> None:
    """Header, one line a span, and the parts by the names that people look for, in milliseconds to the microsecond."""
    lines = picture(told(made.request(1, mode)), PLAIN)
    head = "\n".join(lines[:4])
    assert "request cmpl-1" in head
    assert made.Made(1).hex in head
    assert f"{mode.upper()} over shm, KV 1.0 MiB, 64 tokens in, 16 out, m" in head
    chain = made.READ if mode == "read" else made.WRITE
    ttft = made.total(chain) / 1e6
    assert f"TTFT {ttft:.3f} ms, {ttft + 100.002:.3f} ms in all" in head
    assert set(bars(lines)) >= {"request", "attempt", "kvd.copy", "decode.stream", *(name for name, *_ in chain)}
    parts = table(lines)
    given = {name: ms for name, _, ms in (*made.HEAD, *chain)}
    assert parts["proxy serialization"] == given["proxy.serialization"]
    assert parts["RDMA wait (kv.wait)"] == given["kv.wait"]
    assert parts["unattributed"] == 0.0
    total = parts.pop("TTFT")
    assert round(sum(parts.values()) * 1000) == round(total * 1000) == round(ttft * 1000)
    assert all(len(line) <= PLAIN.width for line in lines)
    assert "\x1b" not in "".join(lines)


def test_bars_are_to_scale() -> None:
    """Up to the first token each bar begins and ends where its span does, within a character; what goes on after it is
    cut with >. With --whole the same spans share the time up to the last token."""
    trace = told(made.request(1))
    found = bars(picture(trace, PLAIN))
    width = len(found["request"])
    scale = width / (made.total(made.READ) / 1000)
    for span in trace["spans"]:
        name = span["name"].removeprefix("pdserve.")
        begin, drawn = (span["start_us"] - made.START / 1000) * scale, found[name]
        if name == "decode.stream":
            continue  # it begins where the picture ends
        assert abs(len(drawn) - len(drawn.lstrip()) - begin) <= 1, name
        if name != "request":
            assert abs(len(drawn.strip()) - max(1.0, span["duration_us"] * scale)) <= 1.5, name
    assert found["request"] == "#" * (width - 1) + ">"
    assert found["decode.stream"].endswith(">")
    whole = bars(picture(trace, PLAIN, whole=True))
    assert whole["request"] == "#" * width
    assert len(whole["attempt"].strip()) < width / 3


def test_what_is_beside_the_critical_path_is_drawn_thin() -> None:
    """WRITE's push lies below prefill's forward and hides behind nothing; a span that nobody waits for is thin."""
    trace = told(made.request(1, "write"))
    for span in trace["spans"]:
        span["critical"] = span["name"] != "pdserve.kvd.push"
    found = bars(picture(trace, PLAIN))
    assert set(found["kvd.push"].strip()) == {"-"}
    assert set(found["prefill.forward"].strip()) == {"#"}


@pytest.mark.parametrize("cause", ["NO_ENGINES: no pair is left", "no pair is left"])
def test_a_failed_request_shows_the_cause(cause: str) -> None:
    """What the client got in the header, its reason once; what each attempt failed with below its bar. Of a trace that
    does not say where it failed there are no parts, as none add up."""
    lines = picture(told(made.failed(1, cause=cause)), PLAIN)
    assert "failed: NO_ENGINES: no pair is left" in lines
    assert any("no first token" in line for line in lines)
    attempt = next(n for n, line in enumerate(lines) if line.lstrip().startswith("attempt"))
    assert lines[attempt + 1].strip() == "! prefill gave up"
    assert not any(line.startswith("part ") for line in lines)


def test_a_failed_request_shows_where_it_was() -> None:
    """In the header and below the part's bar, once each; the parts up to the failure sum to it, the last of them is the
    one in which it failed, and none of it is called TTFT."""
    trace = told(made.broken(1))
    lines = picture(trace, PLAIN)
    assert "failed: PEER_LOST: gone" in lines
    assert "in RDMA wait (kv.wait) or later, after 41.000 ms" in lines
    at = next(n for n, line in enumerate(lines) if line.lstrip().startswith("kv.wait"))
    assert lines[at + 1].strip() == "! it failed here, or later: decode.queue (nobody has stamped that)"
    assert sum("! " in line for line in lines) == 2
    begin = next(n for n, line in enumerate(lines) if line.startswith("part "))
    assert lines[begin].split() == ["part", "ms", "of", "all"]
    parts = table(lines)
    assert list(parts)[-2:] == ["RDMA wait (kv.wait) or later, until it failed", "failed after"]
    total = parts.pop("failed after")
    assert round(sum(parts.values()), 3) == total == 41.0
    assert "TTFT" not in "\n".join(lines)
    shown = listing([trace["request"]])
    assert "PEER_LOST in kv.wait or later" in shown
    assert shown.split()[-3:] == ["-", "-", "-"]


def test_a_part_whose_end_was_seen_is_the_one() -> None:
    """`or later` is said only where it is not known."""
    trace = told(made.broken(1))
    trace["request"]["failed_or_later"] = []
    said = "\n".join([*picture(trace, PLAIN), listing([trace["request"]])])
    assert "in RDMA wait (kv.wait), after 41.000 ms" in said
    assert "RDMA wait (kv.wait), until it failed" in said
    assert re.search(r"PEER_LOST in kv.wait  ", said)


def cancelled() -> dict[str, Any]:
    """A READ whose client left in kv.wait or later."""
    trace = told(made.broken(1))
    trace["request"] |= {"outcome": "cancelled", "reason": "CANCELLED"}
    for span in trace["spans"]:
        if span["status"] == "error":
            span["status_message"] = "CANCELLED: the client left"
    return trace


def test_a_cancelled_request_was_cancelled() -> None:
    """Its parts are until then; nothing is called a failure, nor painted as one."""
    trace = cancelled()
    lines = picture(trace, PLAIN)
    parts = table(lines)
    assert list(parts)[-2:] == ["RDMA wait (kv.wait) or later, until it was cancelled", "cancelled after"]
    assert "cancelled: CANCELLED: the client left" in lines
    at = next(n for n, line in enumerate(lines) if line.lstrip().startswith("kv.wait"))
    assert lines[at + 1].strip() == "- cancelled here, or later: decode.queue (nobody has stamped that)"
    assert "fail" not in "\n".join(lines)
    assert "CANCELLED in kv.wait or later" in listing([trace["request"]])
    assert "\x1b[31m" not in "".join(picture(trace, Style(width=100, colour=True)))
    assert "\x1b[31m" in "".join(picture(told(made.broken(1)), Style(width=100, colour=True)))


def test_a_request_that_ended_after_its_first_token_says_where() -> None:
    """In the stream, and after how long; its mode is that of the pair it was on, its parts are of its TTFT."""
    trace = told(made.request(1))
    trace["request"] |= {"outcome": "failed", "reason": "ENGINE_DIED", "mode": "none", "e2e": 0.609}
    attempt = next(span for span in trace["spans"] if span["name"] == "pdserve.attempt")
    attempt["attributes"]["pdserve.mode"] = "read"
    lines = picture(trace, PLAIN)
    assert "in decode.stream, after 609.000 ms" in lines
    assert "READ over shm" in lines[2]
    assert "TTFT" in table(lines)
    assert "decode.stream, after" not in "\n".join(picture(told(made.request(1)), PLAIN))


def test_a_retried_request_shows_both_attempts() -> None:
    """Siblings, the first with its cause; what it took is the part `retry`."""
    lines = picture(told(made.request(1, retried=True)), PLAIN)
    assert [line.split()[0] for line in lines if line.lstrip().startswith(("attempt", "!"))] == [
        "attempt",
        "!",
        "attempt",
    ]
    assert "1 fallback," in "\n".join(lines[:4])
    assert table(lines)["retry"] == 3.0


def test_parts_that_do_not_sum_are_not_hidden() -> None:
    """A trace that contradicts itself is shown with the contradiction."""
    trace = told(made.request(1))
    trace["request"]["parts"]["egress"] += 0.005
    assert any("not to the TTFT" in line for line in picture(trace, PLAIN))


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    """Bars take what is left of the width; below what names and numbers need they keep ten characters."""
    lines = picture(told(made.request(1)), Style(width=width))
    longest = max(len(line) for line in lines if "|" in line)
    assert longest <= max(width, 80)
    assert min(len(bar) for bar in bars(lines).values()) >= 10


def test_colour_is_only_paint() -> None:
    """With colours the same text is there, and the two parts that people look for stand out."""
    trace = told(made.request(1, retried=True))
    coloured = picture(trace, Style(width=100, colour=True, blocks=False))
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in coloured] == [
        line.rstrip() for line in picture(trace, PLAIN)
    ]
    marked = [line for line in coloured if line.startswith("\x1b[33m")]
    assert len(marked) == 4  # each in the waterfall and in the table


def test_a_trace_cannot_write_to_the_terminal() -> None:
    """Names and messages come from outside: what a terminal would obey is shown as a question mark."""
    trace = made.failed(1, cause="\x1b[2J\x07gone\u202e")
    trace.span("evil\x1b]0;title\x07", made.PROXY, 1, 2)
    body = told(trace)
    body["request"]["request_id"] = "\x1b[31mred"
    shown = "\n".join([*picture(body, PLAIN), listing([body["request"]])])
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert "?[2J?gone?" in shown


def test_orphans_and_circles_are_shown_once() -> None:
    """Spans whose parent is missing stand at the margin; broken traces end."""
    trace = told(made.request(1))
    kept = [span for span in trace["spans"] if span["name"] != "pdserve.attempt"]
    lines = picture({**trace, "spans": kept}, PLAIN)
    assert len(bars(lines)) == len(kept)
    assert any(line.startswith("kv.wait") for line in lines)


@pytest.mark.parametrize(("mode", "shown"), [("read", True), ("write", False)])
def test_the_formula_of_the_mode_is_said(mode: str, shown: bool) -> None:
    """Where the request's span has it."""
    said = "\n".join(picture(told(made.request(1, mode)), PLAIN))
    assert ("READ's formula on the raw intervals: 35.700 ms" in said) is shown
    assert "WRITE's formula" not in said


@pytest.fixture
def other() -> Iterator[str]:
    """An HTTP server that is no trace store."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"[]" if "trace/" in self.path else b"<html>"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_where_it_asks(other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No deployment, nobody there, somebody else there, and no address: each has its sentence and status 1."""
    for words, says in (
        (["--state-dir", str(tmp_path / "none")], "or name a trace store with --traces URL (CONFIG)"),
        (["--traces", "http://127.0.0.1:1"], "no trace store answers at http://127.0.0.1:1: "),
        (["--traces", other], "is no trace store of pdserve (UNAVAILABLE)"),
        (["--traces", "127.0.0.1:16686"], "is no address of a trace store"),
        (["--traces", "file:///etc/passwd"], "is no address of a trace store"),
        (["--traces", "http://127.0.0.1:port"], "is no address of a trace store"),
    ):
        assert main(["trace", "--last", *words]) == 1
        assert says in capsys.readouterr().err


class Late:
    """A trace store that has a request at the third look, and at the second one of an unknown name."""

    grows = True

    def __init__(self) -> None:
        self.looks = 0

    def requests(self, **query: Any) -> list[dict[str, Any]]:
        self.looks += 1
        if "id" not in query:
            return [{"trace_id": "t2"}] if self.looks > 1 else [{"trace_id": "t1"}]
        return [{"trace_id": "t1"}] if self.looks > 2 and query["id"] == "cmpl-1" else []


def test_a_request_that_has_just_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its export is on its way: a name is looked for again, but not for ever. The newest one is given the time that an
    export takes: what was the newest before is not it."""
    monkeypatch.setattr(trace_command, "_POLL", 0.0)
    late: Any = Late()
    assert trace_command._trace_id(late, "cmpl-1") == "t1"
    monkeypatch.setattr(trace_command, "_EXPORT", 0.05)
    with pytest.raises(InvalidRequest, match="no request 'cmpl-2' is in the trace store"):
        trace_command._trace_id(late, "cmpl-2")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    newest: Any = Late()
    assert trace_command._trace_id(newest, None) == "t2"
    assert waited == [trace_command._ON_ITS_WAY]
    assert trace_command._ON_ITS_WAY > 1.5 * EXPORT_DELAY
    monkeypatch.setattr(newest, "requests", lambda **_: [])
    with pytest.raises(InvalidRequest, match="no request has been traced"):
        trace_command._trace_id(newest, None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required"),
        (["a", "--last"], "not allowed with"),
        (["--last", "0"], "0 is not at least 1"),
        (["--last", "x"], "invalid"),
        (["--last", "100000"], "100000 is more than the 10000 that are listed at once"),
    ],
)
def test_one_of_id_and_last_is_needed(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line has status 2, and our own words where a number is out of bounds."""
    with pytest.raises(SystemExit) as caught:
        main(["trace", *words])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_list_has_no_bars_to_draw_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """--last N --whole is refused by name; --last --whole is not, as it draws."""
    assert main(["trace", "--last", "3", "--whole", "--traces", "http://127.0.0.1:1"]) == 1
    assert "--whole" in capsys.readouterr().err
    assert main(["trace", "--last", "--whole", "--traces", "http://127.0.0.1:1"]) == 1
    assert "no trace store answers" in capsys.readouterr().err


def test_a_port_that_speaks_no_http_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence instead of a traceback, as when gRPC's port is named."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(b"SSH-2.0-nothing of HTTP\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            assert main(["trace", "--last", "--traces", address]) == 1
        finally:
            server.shutdown()
            thread.join()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"what answers at {address} speaks no HTTP, so it is no trace store (UNAVAILABLE)" in said
