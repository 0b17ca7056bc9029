"""The process: OpenTelemetry's own exporter in, the `pdserve` command out, and its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode

from pdserve.cli.__main__ import main
from pdserve.traces.__main__ import main as traces_main

WAIT = 30.0


class Process:
    """A running pdserve-traces."""

    def __init__(self, file: Path) -> None:
        flags = ["--otlp-port", "0", "--port", "0", "--file", str(file), "--log-format", "json"]
        self.child = subprocess.Popen(
            [sys.executable, "-m", "pdserve.traces", *flags], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self.child.stderr is not None
        for line in self.child.stderr:
            said = json.loads(line)
            if said["event"] == "traces_ready":
                self.otlp, self.http = str(said["otlp"]), str(said["http"])
                return
        raise AssertionError("it ended before it was ready")

    def stop(self) -> int:
        """Its exit status after a SIGTERM."""
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(WAIT)
        finally:
            self.close()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(WAIT)
        if self.child.stderr is not None:
            self.child.stderr.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traces.sqlite"


@pytest.fixture
def process(file: Path) -> Iterator[Process]:
    running = Process(file)
    yield running
    running.close()


class Alike(RandomIdGenerator):
    """Trace ids that begin with the same digits."""

    def generate_trace_id(self) -> int:
        return 0xABCDEF12 << 96 | super().generate_span_id()


def send(otlp: str, request_id: str, generator: IdGenerator | None = None) -> str:
    """A request that failed, written by OpenTelemetry's SDK; its trace id."""
    provider = TracerProvider(resource=Resource({"service.name": "pdserve-proxy"}), id_generator=generator)
    exporter = OTLPSpanExporter(endpoint=otlp, insecure=True, timeout=WAIT)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    attributes = {"pdserve.request_id": request_id, "pdserve.outcome": "failed", "error.type": "NO_ENGINES"}
    with tracer.start_as_current_span("pdserve.request", kind=SpanKind.SERVER, attributes=attributes) as root:
        with tracer.start_as_current_span("pdserve.route"):
            pass
        root.set_status(Status(StatusCode.ERROR, "no engine is there"))
    assert provider.force_flush(int(WAIT * 1000))
    provider.shutdown()
    return f"{root.get_span_context().trace_id:032x}"


def test_what_opentelemetry_exports_the_command_shows(
    process: Process, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spans of the SDK's exporter are there at once, by request id, by trace id, by its beginning and as the last; a
    SIGTERM ends the process with status 0; another one serves the same file."""
    first, second = send(process.otlp, "cmpl-1"), send(process.otlp, "cmpl-2")
    for words, shown in (
        (["cmpl-1"], first), ([first], first), ([second[:20]], second), (["--last"], second),
        ([" CMPL-1 "], first), (["chatcmpl-cmpl-2"], second), ([second[:8].upper()], second),
    ):  # fmt: skip
        assert main(["trace", *words, "--traces", process.http]) == 0
        said = capsys.readouterr().out
        assert shown in said
        assert "failed: NO_ENGINES: no engine is there" in said
    assert main(["trace", "--last", "5", "--traces", process.http]) == 0
    listing = capsys.readouterr().out
    assert listing.index(second[:12]) < listing.index(first[:12])
    assert main(["trace", "cmpl-1", "--json", "--traces", f"{process.http}/"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["request_id"] == "cmpl-1"
    assert process.stop() == 0
    assert not file.with_name(f"{file.name}-wal").exists(), "the log was folded in"
    again = Process(file)
    try:
        assert main(["trace", "cmpl-2", "--traces", again.http]) == 0
        assert second in capsys.readouterr().out
    finally:
        again.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cmpl-9"], "no request 'cmpl-9' is in the trace store (INVALID_REQUEST)"),
        (["--last"], "no request has been traced"),
    ],
)
def test_what_is_not_there_is_said(
    process: Process, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    """Status 1 and one sentence."""
    assert main(["trace", *words, "--traces", process.http]) == 1
    assert says in capsys.readouterr().err


def test_an_ambiguous_beginning_is_not_guessed(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """Two traces that begin alike are both listed, with their requests."""
    traces = [send(process.otlp, f"cmpl-{n}", Alike()) for n in (1, 2)]
    assert main(["trace", "abcdef12", "--traces", process.http]) == 1
    sentence, *rows = capsys.readouterr().err.splitlines()
    assert sentence == "pdserve: 'abcdef12' may be any of these: say more of it (INVALID_REQUEST)"
    for number, trace in enumerate(traces, 1):
        assert any(trace in row and f"cmpl-{number}" in row for row in rows)
    assert main(["trace", traces[1][:-1], "--traces", process.http]) == 0
    assert traces[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "opens this service to the network"),
        (["--port", "70000"], "not in 0..65535"),
        (["--max-bytes", "1000"], "at least 4194304"),
        (["--max-age", "0"], "max_age is 0"),
        (["--file", "/proc/version"], "not a trace store"),
    ],
)
def test_it_says_why_it_does_not_start(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Status 2. A cluster key does not help to open it: neither port asks for one."""
    given = ["--otlp-port", "0", "--port", "0", "--file", str(tmp_path / "x"), *flags]
    assert traces_main(given) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_port_that_is_taken_is_said(process: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and the address, for either port; nothing is left open."""
    for flag, address in (("--port", process.http), ("--otlp-port", process.otlp)):
        port = address.rpartition(":")[2]
        given = ["--otlp-port", "0", "--port", "0", "--file", str(tmp_path / "y"), flag, port]
        assert traces_main(given) == 2
        assert f"127.0.0.1:{port}" in capsys.readouterr().err
