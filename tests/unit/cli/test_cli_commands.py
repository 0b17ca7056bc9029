"""The commands, against a fake proxy over real gRPC."""

import dataclasses
import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.serving.v1 import serving_pb2
from pdserve.cli import deployment
from pdserve.cli.__main__ import COMMANDS, main
from pdserve.cli.plan import Ports, Spec, make_plan
from pdserve.client import InvalidRequest, NoEngines, Overloaded
from pdserve.client.testing import FakeProxy


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with FakeProxy() as fake:
        yield fake


def finished() -> serving_pb2.Finished:
    return serving_pb2.Finished(
        usage=serving_pb2.Usage(prompt_tokens=4, completion_tokens=2),
        timings=serving_pb2.Timings(ttft_seconds=0.25, e2e_seconds=1.0, parts=[serving_pb2.TimingPart(name="admit")]),
        transfer=common_pb2.TransferFacts(kv_bytes=2048, copy_ns=1000, transport="shm"),
        mode=common_pb2.TRANSFER_MODE_WRITE,
    )


def test_generate_streams_the_answer_and_says_the_facts(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone is on stdout, its facts are on stderr, and the flags reached the proxy."""
    proxy.answer("Hello", " world", finished=finished())
    status = main(["generate", "Hi", "--target", proxy.target, "--max-tokens", "2", "--mode", "write"])
    out, err = capsys.readouterr()
    assert (status, out) == (0, "Hello world\n")
    assert "write, 4 tokens in (0 cached), 2 out, TTFT 250 ms" in err
    assert "KV 2.0 KiB over shm at 2.05 GB/s" in err
    request = proxy.requests[0]
    assert (request.text, request.sampling.max_tokens) == ("Hi", 2)
    assert request.mode == common_pb2.TRANSFER_MODE_WRITE
    assert not request.sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("nanoseconds", "shown"),
    [(1_000, "2.05 GB/s"), (20_480, "0.10 GB/s"), (20_500, "99.90 MB/s"), (2_048_000, "1.00 MB/s")],
)
def test_a_small_copy_has_a_rate_too(
    proxy: FakeProxy, capsys: pytest.CaptureFixture[str], nanoseconds: int, shown: str
) -> None:
    """Below a tenth of a GB/s in MB/s, not as 0.00."""
    done = finished()
    done.transfer.copy_ns = nanoseconds
    proxy.answer("Hello", finished=done)
    assert main(["generate", "Hi", "--target", proxy.target]) == 0
    assert f"KV 2.0 KiB over shm at {shown}" in capsys.readouterr().err


def test_the_http_port_is_no_grpc_port(capsys: pytest.CaptureFixture[str]) -> None:
    """Who names it is asked, behind gRPC's own words."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            target = f"127.0.0.1:{server.server_port}"
            assert main(["generate", "Hi", "--target", target, "--retry", "0"]) == 1
        finally:
            server.shutdown()
            serving.join(30)
    assert "(is this the HTTP port? The gRPC port is another) (UNAVAILABLE)" in capsys.readouterr().err


def test_what_the_transport_went_over_is_said_where_it_tells(
    proxy: FakeProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the line of facts, and in JSON."""
    done = finished()
    done.transfer.transport, done.transfer.lanes = "nixl", "tcp/eth0"
    for words in ((), ("--json",)):
        proxy.answer("Hello", finished=done)
        assert main(["generate", "Hi", "--target", proxy.target, *words]) == 0
    out, err = capsys.readouterr()
    assert "KV 2.0 KiB over nixl (tcp/eth0) at 2.05 GB/s" in err
    assert '"lanes": "tcp/eth0"' in out


def test_generate_json_is_one_object_with_every_fact(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """--json gives text, usage, timings and transfer to programs."""
    proxy.answer("Hello", finished=finished())
    assert main(["generate", "Hi", "--target", proxy.target, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["choices"][0]["text"] == "Hello"
    assert said["timings"]["parts"] == {"admit": 0.0}
    assert (said["transfer"]["kv_bytes"], said["transfer"]["lanes"]) == (2048, "")
    assert said["mode"] == "write"


def test_generate_reads_a_prompt_from_stdin(proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a prompt stdin is it, whole; an empty one is refused before anything is sent."""
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "--target", proxy.target, "--quiet"]) == 0
    assert proxy.requests[0].text == "two\nlines\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", "--target", proxy.target]) == 1
    assert len(proxy.requests) == 1


def test_a_failed_answer_says_its_request(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, for `pdserve trace`; not with --quiet, and not where nobody has taken the request."""
    for words, target, told in (
        ([], proxy.target, True),
        (["--quiet"], proxy.target, False),
        (["--retry", "0"], "127.0.0.1:1", False),
    ):
        proxy.answer("Hel", error=NoEngines("the last decode engine is gone"))
        assert main(["generate", "Hi", "--target", target, "--timeout", "5", *words]) == 1
        assert ("request fake-1: see pdserve trace fake-1\n" in capsys.readouterr().err) is told


def test_an_error_is_one_sentence_with_its_reason(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """A typed error of the proxy is said on stderr, without a traceback, and the exit status is 1."""
    proxy.answer("Hel", error=NoEngines("the last decode engine is gone"))
    assert main(["generate", "Hi", "--target", proxy.target, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "Hel"
    assert err == "pdserve: the last decode engine is gone (NO_ENGINES)\n"


def test_why_it_is_asked_again_is_said_once(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reason, on stderr, while nobody can answer; not with --quiet, and never with --retry 0."""
    for words, told in (([], True), (["--quiet"], False)):
        for _ in range(2):
            proxy.refuse(NoEngines("no pair is there"))
        assert main(["generate", "Hi", "--target", proxy.target, *words]) == 0
        out, err = capsys.readouterr()
        assert (out, err.count("pdserve: no pair is there (NO_ENGINES); asking again\n")) == ("ok\n", int(told))
    proxy.refuse(NoEngines("no pair is there"))
    assert main(["generate", "Hi", "--target", proxy.target, "--retry", "0"]) == 1
    assert capsys.readouterr() == ("", "pdserve: no pair is there (NO_ENGINES)\n")


class Terminal(io.StringIO):
    """Takes what is printed, as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(("said", "shown"), [(("Hel",), "Hel\npdserve: gone"), ((), "pdserve: gone")])
def test_an_error_has_a_line_of_its_own_on_a_terminal(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, command: str, said: tuple[str, ...], shown: str
) -> None:
    """Text that was streamed is ended first; where there is none, no line is left empty."""
    proxy.answer(*said, error=InvalidRequest("gone"))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    main([command, *(["Hi"] if command == "generate" else []), "--target", proxy.target])
    assert screen.getvalue().startswith(f"{shown} (INVALID_REQUEST)\n")


@pytest.mark.parametrize(
    ("fallbacks", "recomputed", "says"),
    [
        (1, 4, ("computed by decode, 4", ", 1 fallback, ")),
        (2, 0, ("colocated, 4", ", 2 fallbacks, ")),
        (0, 4, ("computed by decode, 4",)),
        (0, 0, ("colocated, 4",)),
    ],
)
def test_the_facts_say_who_computed(
    proxy: FakeProxy, capsys: pytest.CaptureFixture[str], fallbacks: int, recomputed: int, says: tuple[str, ...]
) -> None:
    """Without a hand-over: decode, where one failed or could not be begun and decode computed the prompt; else a
    colocated engine."""
    usage = serving_pb2.Usage(prompt_tokens=4, completion_tokens=2)
    facts = serving_pb2.Finished(usage=usage, fallbacks=fallbacks, recomputed_tokens=recomputed)
    proxy.answer("Hello", finished=facts)
    assert main(["generate", "Hi", "--target", proxy.target]) == 0
    err = capsys.readouterr().err
    assert all(words in err for words in says)
    assert err.startswith(says[0])


def test_chat_keeps_the_conversation(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn sends what was said before; a failed answer is not part of it, /clear forgets it."""
    proxy.answer("A")
    proxy.refuse(Overloaded("not now"))
    proxy.answer("C", finished=finished())
    proxy.answer("D")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n\nc\n/facts\n/clear\nd\n/quit\nnever\n"))
    assert main(["chat", "--target", proxy.target, "--system", "be kind"]) == 0
    turns = [[(m.role, m.content) for m in request.chat.messages] for request in proxy.requests]
    system = ("system", "be kind")
    assert turns[0] == [system, ("user", "a")]
    assert turns[-2] == [system, ("user", "a"), ("assistant", "A"), ("user", "c")]
    assert turns[-1] == [system, ("user", "d")]
    out, err = capsys.readouterr()
    assert out.startswith("A\n")
    assert "TTFT 250 ms" in out
    assert "not now" in err


def test_status_shows_every_engine(proxy: FakeProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per engine with its state and why it is not used; --json gives the same to programs."""
    proxy.topology.default_mode = common_pb2.TRANSFER_MODE_READ
    proxy.topology.in_flight = 3
    proxy.topology.engines.add(
        engine_id="0123456789", role=common_pb2.ENGINE_ROLE_DECODE, state="suspect", excluded_because="2 beats missed"
    )
    assert main(["status", "--target", proxy.target]) == 0
    out = capsys.readouterr().out
    assert "mode read, 3 in flight, 0 queued" in out
    assert "01234567  decode" in out
    assert "suspect (2 beats missed)" in out
    assert main(["status", "--target", proxy.target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["engine_id"] == "0123456789"


def test_status_shows_the_processes_of_a_deployment_here(
    proxy: FakeProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by its folder: a row per process with its pid, how often it was started again, and where its metrics are;
    --json has them too."""
    ports = Ports(1, 2, 3, (4, 5), metrics=(6, 7, 8))
    made = dataclasses.replace(make_plan(Spec(), tmp_path, ports, "python", ()), grpc=proxy.target)
    with deployment.claimed(tmp_path):
        deployment.publish(tmp_path, made, {"kvd": 71, "proxy": 72}, {"kvd": 0, "proxy": 2})
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert rows[-2:] == [
            ["kvd", "71", "0", "http://127.0.0.1:6/metrics"],
            ["proxy", "72", "2", "http://127.0.0.1:2/metrics"],
        ]
        assert main(["status", "--state-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["processes"]["proxy"] == {
        "pid": 72,
        "restarts": 2,
        "metrics": "http://127.0.0.1:2/metrics",
    }


@pytest.mark.parametrize(
    ("kept", "pids", "says"),
    [
        (True, {"traces": 71}, "traces http://127.0.0.1:7"),
        (True, {}, "traces not kept any more"),
        (False, {}, "traces not kept here"),
    ],
)
def test_status_begins_with_where_the_deployment_is(
    proxy: FakeProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: bool, pids: dict[str, int], says: str
) -> None:
    """gRPC, HTTP and traces, as its record has them; a trace store that is gone is not pointed to."""
    spec = Spec(engine="sim", traces=kept)
    made = make_plan(spec, tmp_path, Ports(1, 2, 3, (4, 5), 6, 7), "python", ())
    with deployment.claimed(tmp_path):
        deployment.publish(tmp_path, dataclasses.replace(made, grpc=proxy.target), pids, dict.fromkeys(pids, 0))
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert head == f"gRPC {proxy.target}, HTTP http://127.0.0.1:2/v1, {says}"


@pytest.mark.parametrize("count", ["-1", "some"])
def test_up_refuses_a_number_of_restarts_that_is_none(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is started, as any mistyped flag."""
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--restarts", count])
    assert "--restarts" in capsys.readouterr().err


def test_without_a_deployment_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """No --target and nothing running: the sentence names both ways on."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 1
    err = capsys.readouterr().err
    assert "pdserve up" in err
    assert "--target" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_mistakes_answer_without_grpc(name: str) -> None:
    """--help of every command, and a mistyped flag, load no grpc: they answer at once."""
    code = (
        "import sys; from pdserve.cli.__main__ import main\n"
        f"for words in (['{name}', '--help'], ['{name}', '--no-such-flag']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: print(end.code, file=sys.stderr)\n"
        "print([m for m in sys.modules if m == 'grpc' or m.startswith('google')], file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    codes = [line for line in result.stderr.splitlines() if line.isdecimal()]
    assert codes == ["0", "2"]
    assert result.stderr.splitlines()[-1] == "[]"
    assert "usage: pdserve" in result.stdout


@pytest.mark.parametrize("port", ["-1", "65536", "70000"])
@pytest.mark.parametrize(
    "flag", ["up --grpc-port", "up --http-port", "up --traces-port", "up --ping-port", "doctor --ports"]
)
def test_what_is_no_port_is_refused(flag: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that takes it, with the range; before anything is bound or started."""
    command, name = flag.split()
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={port}"])
    assert ended.value.code == 2
    assert f"{port} is not a TCP port: 0 to 65535" in capsys.readouterr().err
