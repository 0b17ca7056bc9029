"""`pdserve-proxy` and OpenTelemetry's variables: what is built, and what is refused at the start."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from pdserve.proxy.__main__ import main
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.runtime.config import load_cluster_key
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import names
from tests.unit.telemetry.collector import Collector


def test_a_proxy_does_not_load_the_sdk() -> None:
    """Its import takes time and memory; who traces nothing needs it nowhere, and who traces in another process."""
    code = "import sys, pdserve.proxy.__main__; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")]
)
def test_variables_that_make_no_sense(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and what is wrong, though it is another process that reads them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    try:
        assert main(["--log-format", "json"]) == 2
    finally:
        gc.unfreeze()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (error,) = [line["error"] for line in lines if line["event"] == "cannot_start"]
    assert error.startswith("OTEL_EXPORTER_OTLP_...")
    assert value in error


@pytest.mark.parametrize(("argv", "share"), [(["--trace-ratio", "2"], "1"), ([], "7"), (["--trace-slow", "-1"], "1")])
def test_a_share_that_cannot_be(argv: list[str], share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2, whether the flag or the variable says it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    assert main(argv) == 2


async def test_the_command_sends_what_it_traced_before_it_ends() -> None:
    """A process of its own with fake engines behind it: one request, SIGTERM at once, and the whole trace is at the
    collector though the batch was not due."""
    collector, signer, handovers = Collector(), Signer(load_cluster_key(None).secret), Handovers()
    await collector.start()
    engines = [FakeEngine(role, signer, handovers) for role in ("prefill", "decode")]
    environ = dict(os.environ) | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    code = (
        "import sys\n"
        "from pdserve.proxy import __main__ as proxy\n"
        "from tests.unit.proxy.undisturbed import command\n"
        "proxy.command = command\n"
        "sys.exit(proxy.main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "--log-format", "json", "--beat-interval", "60"),
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    assert process.stderr is not None

    async def heard(event: str) -> dict[str, Any]:
        assert process.stderr is not None
        while True:
            line = await process.stderr.readline()
            assert line, f"it ended before {event}"
            if event.encode() in line:
                return dict(json.loads(line))

    try:
        async with asyncio.timeout(40), AsyncExitStack() as stack:
            where = await heard("proxy_ready")
            for engine in engines:
                stack.push_async_callback(engine.stop)
                await engine.start()
                await engine.register(where["registration"])
                await heard("engine_connected")
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{where['http']}"))
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as response:
                answer = await response.json()
            process.send_signal(signal.SIGTERM)
            closed = await heard("traces_closed")
            assert await process.wait() == 0
        got = {one.span.name for one in collector.spans}
        assert {names.REQUEST, names.ATTEMPT, "pdserve.route", "pdserve.egress"} <= got
        assert {one.span.trace_id.hex() for one in collector.spans} == {answer["pdserve"]["trace_id"]}
        assert (closed["exported"], closed["dropped"], closed["failed"]) == (len(collector.spans), 0, 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await collector.kill()
