"""GET /metrics over real loopback sockets: where it is asked for, and nowhere else."""

import json
from pathlib import Path

import aiohttp
import pytest

from pdserve.decode.__main__ import PROGRAM as DECODE
from pdserve.engine.hosting.program import read
from pdserve.kvd.__main__ import parse as parse_kvd
from pdserve.kvd.testing import kvd_process
from pdserve.proxy.app import ProxyApp
from pdserve.proxy.config import ProxyConfig
from pdserve.rpc.errors import ConfigError
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import INSECURE_KEY, ClusterKey, MetricsConfig
from pdserve.runtime.signing import Signer
from pdserve.runtime.telemetry import catalogue
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.serve import MetricsServer
from tests.unit.telemetry.exposed import parse

KEYLESS, KEYED = ClusterKey(INSECURE_KEY, given=False), ClusterKey(b"x" * 16, given=True)
PORTS = ("--metrics-port", "0")


async def get(address: str, path: str = "/metrics") -> tuple[int, str, bytes]:
    """Status, content type, body."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
        return response.status, response.headers["Content-Type"], await response.read()


async def test_a_server_answers_one_path() -> None:
    """In Prometheus' text format, and nothing else."""
    server = MetricsServer(Metrics("pdserve-test", (catalogue.BUILD_INFO, catalogue.FALLBACKS)))
    address = await server.start(MetricsConfig(port=0))
    try:
        status, kind, body = await get(address)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert parse(body).each(catalogue.FALLBACKS) == [0]
        assert (await get(address, "/"))[0] == 404
        with pytest.raises(ConfigError, match="cannot bind the metrics port"):
            await MetricsServer(Metrics("b", ())).start(MetricsConfig(port=int(address.rpartition(":")[2])))
    finally:
        await server.aclose()
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(address)


async def test_a_defect_in_a_reading_is_an_answer_that_says_so() -> None:
    """500, so that Prometheus counts the service as down rather than take half of it."""
    metrics = Metrics("pdserve-test", (catalogue.BUILD_INFO,))
    metrics.read(lambda: [(catalogue.KVD_DRAINING, (), 1)])
    server = MetricsServer(metrics)
    address = await server.start(MetricsConfig(port=0))
    try:
        assert (await get(address))[0] == 500
    finally:
        await server.aclose()


async def test_the_proxy_shows_its_metrics_beside_the_api() -> None:
    """On its HTTP port, without being asked; two proxies in one process show their own."""
    signer = Signer(INSECURE_KEY)
    apps = [await ProxyApp.start(ProxyConfig(), signer, Clock(), lambda n: b"1" * n) for _ in range(2)]
    try:
        first, second = (app.addresses.http for app in apps)
        async with aiohttp.ClientSession() as session, session.post(f"http://{first}/v1/completions", data=b"{") as bad:
            assert bad.status == 400
        shown = [parse((await get(address))[2]) for address in (first, second)]
        assert shown[0].by(catalogue.REFUSALS, "reason") == {("INVALID_REQUEST",): 1}
        assert shown[1].by(catalogue.REFUSALS, "reason") == {}
        assert shown[0].of(catalogue.PROXY_ENGINES) == 0
    finally:
        for app in apps:
            await app.aclose()


def test_no_port_is_opened_unasked(tmp_path: Path) -> None:
    """kvd and the engines' services open none by default; 0 asks for a free one; no port is no port."""
    config, _ = parse_kvd(["--state-dir", str(tmp_path)])
    assert config.metrics.port is None
    config, _ = parse_kvd(["--state-dir", str(tmp_path), *PORTS])
    assert config.metrics == MetricsConfig(port=0)
    plan = read(DECODE, ["--engine", "sim", "--role", "both", "--metrics-port", "9103", "--metrics-host", "::1"])
    assert plan.host.metrics == MetricsConfig(9103, "::1")
    assert read(DECODE, ["--engine", "sim", "--role", "both"]).host.metrics.port is None
    with pytest.raises(ConfigError, match=r"not in 0\.\.65535"):
        parse_kvd(["--state-dir", str(tmp_path), "--metrics-port", "70000"])


def test_the_network_is_served_only_with_a_key(tmp_path: Path) -> None:
    """The rule of every port: more than loopback takes a cluster key, or --insecure where there is one."""
    with pytest.raises(ConfigError, match="opens this service to the network"):
        MetricsConfig(0, "0.0.0.0").check(KEYLESS)
    MetricsConfig(0, "0.0.0.0").check(KEYED)
    MetricsConfig(None, "0.0.0.0").check(KEYLESS)
    MetricsConfig(0, "0.0.0.0").check(KEYLESS, insecure=True)
    with pytest.raises(ConfigError, match="opens this service to the network"):
        parse_kvd(["--state-dir", str(tmp_path), *PORTS, "--metrics-host", "0.0.0.0"])


async def test_kvd_serves_metrics_of_its_process(tmp_path: Path) -> None:
    """`pdserve-kvd --metrics-port 0` says where, and shows its own and its process' metrics."""
    async with kvd_process(tmp_path, *PORTS, "--log-format", "json") as kvd:
        status, _, body = await get(json.loads(kvd.ready)["metrics"])
        shown = parse(body)
        assert status == 200
        assert shown.each(catalogue.KVD_DEFECTS) == [0]
        assert shown.values["process_resident_memory_bytes", ()] > 1 << 20
