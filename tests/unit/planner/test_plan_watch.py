"""`pdserve plan --watch`: what it reads off a proxy, what ends it and what does not. The proxy is a page of metrics."""

import contextlib
import functools
import itertools
import json
import re
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdserve.cli.__main__ import main
from pdserve.planner import watching
from pdserve.planner.planning import metrics, present
from pdserve.planner.planning.metrics import Reading
from pdserve.planner.planning.workload import Workload
from pdserve.rpc.errors import ConfigError

PAGE = """\
# TYPE pdserve_requests_total counter
pdserve_requests_total{{outcome="finished",mode="write"}} {ended}
# TYPE pdserve_tokens_total counter
pdserve_tokens_total{{kind="input"}} {input}
pdserve_tokens_total{{kind="output"}} {output}
pdserve_tokens_total{{kind="cached"}} 0
# TYPE pdserve_proxy_queued gauge
pdserve_proxy_queued 0
# TYPE pdserve_proxy_in_flight gauge
pdserve_proxy_in_flight 0
# TYPE pdserve_proxy_engines gauge
pdserve_proxy_engines{{role="prefill",state="ready"}} {engines}
pdserve_proxy_engines{{role="decode",state="ready"}} {engines}
"""


def page(ended: int, engines: int = 1) -> str:
    """Of a proxy that has answered so many requests of 1000 tokens in and 50 out."""
    return PAGE.format(ended=ended, input=1000 * ended, output=50 * ended, engines=engines)


@contextlib.contextmanager
def proxy(*pages: str | None) -> Iterator[str]:
    """Gives these pages in turn, the last one for ever; None is an error 500. Its address."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the base class calls it by this name
            text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200 if text is not None else 500)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _serving(HTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@contextlib.contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Ended(Exception):
    """Instead of Ctrl-C."""


def watched(*pages: str | None, once: bool = False) -> tuple[list[Workload], list[str]]:
    """Watches these pages, a window each, until they are over: what was planned for, and the lines that were said.

    A window of which 7 requests are the whole cannot be planned for.
    """
    planned: list[Workload] = []
    said: list[str] = []
    windows = iter(range(len(pages) - 1))

    def wait(_: float) -> None:
        if next(windows, None) is None:
            raise Ended

    def plan(workload: Workload, now: Reading, _: Mapping[str, float]) -> None:
        if now.ended == 7:
            raise ConfigError("too few engines for that")
        planned.append(workload)

    with proxy(*pages) as url, contextlib.suppress(Ended):
        watching.watch(url, 1.0, plan, said.append, once=once, wait=wait, clock=itertools.count().__next__)
    return planned, said


@pytest.fixture
def patiently(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes so many windows of ten seconds pass at once, and then ends the watch as Ctrl-C does."""

    def windows(count: int) -> None:
        left = iter(range(count))

        def wait(_: float) -> None:
            if next(left, None) is None:
                raise Ended

        clock = itertools.count(step=10.0).__next__
        monkeypatch.setattr(watching, "watch", functools.partial(watching.watch, wait=wait, clock=clock))

    return windows


def test_watch_once_plans(patiently: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """`--watch URL --once` reads twice and plans for what came between, with the engines that are ready."""
    patiently(1)
    with proxy(page(0), page(20)) as url:
        words = ["--watch", url, "--once", "--slo-ttft", "5", "--slo-itl", "0.2", "--quick", "--requests", "20"]
        assert main(["plan", "--profile", "mi300x", *words]) == 0
    out = capsys.readouterr().out
    assert "1 prefill, 1 decode engines are ready" in out
    assert "2 engines (profile mi300x): 1000 tokens in, 50 out, 2 req/s" in out
    assert "-> " in out


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ((page(0), None, page(10), page(20)), "does not give its metrics: HTTP Error 500"),
        ((page(50), page(0), page(20)), "was started anew"),
        ((page(0), page(7), page(20)), "too few engines for that"),
        ((page(0), page(0), page(20)), "no request was answered"),
        ((page(0), "up 1\n", page(10), page(20)), "not the metrics of a pdserve proxy"),
    ],
    ids=["failed scrape", "restart", "cannot be planned for", "quiet", "another server"],
)
def test_what_goes_wrong_does_not_end_the_watch(pages: tuple[str | None, ...], why: str) -> None:
    """It is said in one line, and the next whole window is planned for. With --once it is the error."""
    planned, said = watched(*pages)
    assert len(planned) == 1
    assert planned[0].prompt.low == 1000
    assert len(said) == 1
    assert why in said[0]
    assert "\n" not in said[0]
    with pytest.raises(ConfigError, match=why):
        watched(*pages, once=True)


def test_window_without_engines_goes_on(patiently: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is ready for a while: there is nothing to plan with, which is said; the command goes on until it is
    interrupted."""
    patiently(2)
    with proxy(page(0), page(10, engines=0), page(20)) as url, pytest.raises(Ended):
        main(["plan", "--profile", "mi300x", "--watch", url, "--slo-ttft", "5", "--requests", "20", "--quick"])
    out, err = capsys.readouterr()
    assert err == "0 engines: there must be at least one\n"
    assert out.count("-> ") == 1


class _Garbage(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"\x00\x00\x12\x04garbage\r\n")


def test_port_of_something_else_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that does not speak HTTP, such as a gRPC one, is refused in one line."""
    with _serving(socketserver.TCPServer(("127.0.0.1", 0), _Garbage)) as url:
        assert main(["plan", "--profile", "mi300x", "--watch", url, "--slo-ttft", "1"]) == 1
    err = capsys.readouterr().err
    assert "does not give its metrics" in err
    assert err.count("\n") == 1


def test_page_is_a_proxys() -> None:
    """What these tests serve is what the metrics' reader takes for a proxy."""
    assert metrics.read(page(3), 0.0).engines == {"prefill": 1, "decode": 1, "both": 0}


def layout(**engines: int) -> str:
    """Of ready engines, in words."""
    found = present.layout({"prefill": 0, "decode": 0, "both": 0} | engines, {"read": 1, "write": 5, "none": 2})
    return "" if found is None else found.label


def test_layout_is_what_runs() -> None:
    """The pairs in the mode that most requests had, and who serves whole requests; a half of a pair is nothing."""
    assert layout(prefill=2, decode=1) == "2P:1D WRITE"
    assert layout(both=3) == "3 colocated"
    assert layout(prefill=1, decode=1, both=1) == "1P:1D and 1 colocated WRITE"
    assert layout(prefill=2) == ""
    first, second = (metrics.read(page(ended), 0.0) for ended in (0, 20))
    assert metrics.modes(first, second) == {"read": 0.0, "write": 20.0, "none": 0.0}


def test_watch_says_what_the_present_layout_attains(
    patiently: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the best way: what the engines that are ready come to at the load that comes in, and their goodput."""
    patiently(1)
    flags = ["--once", "--slo-ttft", "1", "--slo-itl", "0.5", "--requests", "20"]
    with proxy(page(0), page(600)) as url:
        assert main(["plan", "--profile", "mi300x", "--watch", url, "--engines", "4", *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Runs now: "))
    print(line)
    assert re.fullmatch(
        r"Runs now: 1P:1D WRITE, \d+% \(\d+% to \d+%\) of the requests meet every objective at 60 req/s, "
        r"goodput [\d.]+ req/s \([\d.]+ to [\d.]+\); 4 colocated is better or as good\.",
        line,
    )


def test_present_layout_that_the_profile_does_not_know(
    patiently: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines of which the profile has no costs are named, and why they cannot be judged; the plan goes on."""
    patiently(1)
    flags = ["--once", "--slo-ttft", "5", "--slo-itl", "0.5", "--requests", "20", "--json", "--quick"]
    with proxy(page(0), page(20)) as url:
        assert main(["plan", "--profile", "mi300x-tp8", "--watch", url, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["present"]["label"] == "1P:1D WRITE"
    assert "has no numbers for prefill and decode engines" in found["present"]["not_judged"]
    assert "It cannot be judged: " in found["words"]


def test_watch_with_two_sizes_needs_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    """No window could mend that: it is refused before the first, without a word to the proxy."""
    flags = ["--profile", "mi300x", "--profile", "mi300x-tp8", "--watch", "http://127.0.0.1:1", "--slo-ttft", "1"]
    assert main(["plan", *flags]) == 1
    assert "say how many accelerators with --gpus" in capsys.readouterr().err
