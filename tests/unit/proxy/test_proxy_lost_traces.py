"""`pdserve-proxy` says what became of its spans, also of those that nobody has got.

Fakes: the collector and the engines, over real ports.
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from pdserve.proxy.__main__ import main, serve
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.metrics import span_readings
from pdserve.proxy.testing import FakeEngine, Handovers
from pdserve.runtime.config import load_cluster_key
from pdserve.runtime.lifecycle import Shutdown
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import catalogue, names, settings
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.span import Counts
from tests.unit.proxy import undisturbed
from tests.unit.telemetry.collector import Collector
from tests.unit.telemetry.exposed import parse


@asynccontextmanager
async def proxy() -> AsyncIterator[aiohttp.ClientSession]:
    """The program's own `serve` with a fake pair behind it: its HTTP."""
    signer, handovers = Signer(load_cluster_key(None).secret), Handovers()
    shutdown, lines = Shutdown(), list[Any]()

    async def heard(event: str, times: int = 1) -> Mapping[str, Any]:
        while len(found := [line for line in lines if line["event"] == event]) < times:  # noqa: ASYNC110 - a log
            await asyncio.sleep(0.01)
        return dict(found[-1])

    async with asyncio.timeout(40), AsyncExitStack() as stack:
        lines = stack.enter_context(capture_logs())
        running = asyncio.create_task(serve(ProxyConfig(beat_interval=60.0), signer, shutdown))
        stack.callback(gc.unfreeze)
        stack.push_async_callback(lambda: running)
        stack.callback(shutdown.request)
        where = await heard("proxy_ready")
        engines = FakeEngine("prefill", signer, handovers), FakeEngine("decode", signer, handovers)
        for number, engine in enumerate(engines, 1):
            stack.push_async_callback(engine.stop)
            await engine.start()
            await engine.register(where["registration"])
            await heard("engine_connected", number)
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{where['http']}"))
        yield session


async def ask(session: aiohttp.ClientSession) -> None:
    """One request that is answered."""
    async with session.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2}) as response:
        assert response.status == 200, await response.text()


async def spans(session: aiohttp.ClientSession) -> dict[str, float]:
    """As GET /metrics says, by what became of them."""
    async with session.get("/metrics") as response:
        shown = parse(await response.read())
    states = ("exported", "dropped", "failed")
    return {state: value for state in states for value in shown.each(catalogue.PROXY_SPANS, state=state)}


async def until(session: aiohttp.ClientSession, enough: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Asks until they say so."""
    while not enough(said := await spans(session)):  # noqa: ASYNC110 - Prometheus polls too
        await asyncio.sleep(0.02)
    return said


async def test_spans_are_counted_by_what_became_of_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """0 from the start; what the collector has taken is exported; what it was not there for has failed, and that is
    said in the log that the proxy's lines go to."""
    collector = Collector()
    await collector.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    monkeypatch.setattr("pdserve.proxy.__main__.command", undisturbed.command)
    try:
        async with proxy() as session:
            assert gc.get_freeze_count() > 0, "what a start leaves is not looked at again"
            assert await spans(session) == {"exported": 0, "dropped": 0, "failed": 0}
            await ask(session)
            said = await until(session, lambda said: said["exported"] > 0)
            assert said == {"exported": len(collector.spans), "dropped": 0, "failed": 0}
            await collector.kill()
            await ask(session)
            lost = await until(session, lambda said: said["failed"] > 0)
            assert lost == {"exported": len(collector.spans), "dropped": 0, "failed": len(collector.spans)}
            assert capfd.readouterr().err.count("traces_not_sent") == 1
    finally:
        await collector.kill()


async def test_traces_that_go_nowhere_have_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no series at all, rather than one that stands at 0."""
    for name in (*settings.ENDPOINTS, settings.EXPORTER):
        monkeypatch.delenv(name, raising=False)
    async with proxy() as session:
        await ask(session)
        assert await spans(session) == {}


def test_each_state_has_its_own_number() -> None:
    """A full queue is told from a collector that is away."""
    metrics = Metrics(names.PROXY, catalogue.PROXY)
    metrics.read(lambda: span_readings(Counts(exported=5, dropped=3, failed=2)))
    shown = parse(metrics.expose())
    assert shown.by(catalogue.PROXY_SPANS, "state") == {("exported",): 5, ("dropped",): 3, ("failed",): 2}


@pytest.mark.parametrize(
    "environ",
    [
        {settings.SAMPLER: "jaeger_remote"},
        {settings.EXPORTER: "console"},
        {settings.ENDPOINTS[1]: "http://127.0.0.1:1", settings.PROTOCOLS[1]: "http/protobuf"},
    ],
)
def test_variables_that_are_not_spoken_stop_the_start(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and the variable's name, before a port is bound."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["--log-format", "json"]) == 2
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert line["event"] == "cannot_start"
    assert list(environ)[-1] in line["error"]


def test_the_flag_wins_over_the_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--trace-ratio` nobody reads the sampler: what is refused then is the next thing that is wrong."""
    monkeypatch.setenv(settings.SAMPLER, "jaeger_remote")
    monkeypatch.setenv(settings.EXPORTER, "console")
    assert main(["--trace-ratio", "0.5", "--log-format", "json"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert settings.EXPORTER in error
    assert settings.SAMPLER not in error
