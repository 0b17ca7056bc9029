"""A deployment in a real engine, from `up` to `down -v`; the tests are its life in order, and share it.

Real: the engine, the images, every container, network, volume and signal. Not real: the model (sim engines) and Jaeger,
for whose image our own trace store stands in; the base image is made from Debian's packages.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from pdserve.client import AsyncClient
from tests.compose.asking import MODES, answer_over_grpc, answer_over_http
from tests.compose.deployment import COMPOSE, SERVICES, CommandFailed, Deployment, deployed, is_mounted, run
from tests.compose.load import Seen, streams

pytestmark = pytest.mark.timeout(900)
PROJECT = "pdserve-test"
RATE = 5
"""Streams a second while services are replaced."""


@pytest.fixture(scope="module")
def deployment(compose: Path, images: None) -> Iterator[Deployment]:
    """Nothing runs yet; what runs at the end is taken down."""
    with deployed(compose, PROJECT) as made:
        yield made


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def seen(deployment: Deployment) -> AsyncIterator[Seen]:
    """Streams that begin as long as the tests of a class run; those that end afterwards are judged too."""
    async with streams(deployment.grpc, deployment.http, RATE) as seen:
        yield seen
    assert not seen.errors, "\n".join(seen.errors[:5])


async def test_up_waits_until_a_request_can_be_answered(deployment: Deployment) -> None:
    """`up --wait` returns when every service is healthy, and then the first request is answered."""
    began = asyncio.get_running_loop().time()
    await deployment.compose("up", "--detach", "--wait", "--no-build", timeout=120)
    print(f"compose: up --wait took {asyncio.get_running_loop().time() - began:.1f} s")
    await deployment.healthy(*SERVICES)
    await answer_over_grpc(deployment, "read")


async def test_containers_may_do_as_little_as_the_file_says(deployment: Deployment) -> None:
    """The engine has taken all of it: no root, no capability, no file that can be written."""
    found = await deployment.containers()
    probe = (
        "import os; assert os.getuid() != 0;"
        "print([line for line in open('/proc/1/status') if line.startswith('CapEff')], flush=True); open('/opt/x', 'w')"
    )

    async def probed(service: str) -> None:
        (container,) = found[service]
        host = container["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Init"]) == (True, ["ALL"], True), service
        with pytest.raises(CommandFailed, match="Read-only file system") as refused:
            await deployment.compose("exec", "-T", service, "python", "-I", "-S", "-c", probe)
        assert "CapEff:\\t0000000000000000" in str(refused.value), service

    await asyncio.gather(*(probed(service) for service in ("kvd", "prefill", "decode", "proxy")))


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_over_each_face(deployment: Deployment, mode: str) -> None:
    """gRPC and HTTP, READ and WRITE: answered, with the KV handed over through kvd's shared memory."""
    await answer_over_grpc(deployment, mode)
    await answer_over_http(deployment, mode)


async def test_the_trace_is_in_jaeger(deployment: Deployment) -> None:
    """Jaeger's API, at Jaeger's port, has the request's trace with spans of every service within 10 s."""
    trace = await answer_over_grpc(deployment, "read")
    url = f"http://127.0.0.1:{deployment.traces}/api/traces/{trace}"
    async with asyncio.timeout(10), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as response:
                if response.status == 200:
                    (found,) = (await response.json())["data"]
                    break
            await asyncio.sleep(0.2)
    names = {process["serviceName"] for process in found["processes"].values()}
    assert names == {"pdserve-proxy", "pdserve-prefill", "pdserve-decode", "pdserve-kvd"}


async def test_every_service_shows_its_metrics_on_the_network(deployment: Deployment) -> None:
    """What prometheus.yml asks for is there, under the names that it asks for."""
    ask = (
        "import sys, urllib.request\n"
        "for url in sys.argv[1:]: assert b'pdserve_build_info' in urllib.request.urlopen(url, timeout=5).read(), url"
    )
    ports = (("proxy", 8000), ("kvd", 9101), ("prefill", 9101), ("decode", 9101))
    urls = [f"http://{service}:{port}/metrics" for service, port in ports]
    await deployment.compose("exec", "-T", "jaeger", "python", "-I", "-S", "-c", ask, *urls)


async def test_the_bench_runs_beside_it(deployment: Deployment) -> None:
    """Profile bench offers its load to the proxy and finds every request answered."""
    load = "--input-len 64 --output-len 8 --rate 20 --requests 20"
    words = ("--profile", "bench", "run", "--rm", "--no-deps", "-T", "bench")
    told = await deployment.compose(*words, "pdserve", "bench", "--target", "proxy:50050", *load.split(), timeout=120)
    assert "20" in told


@pytest.mark.asyncio(loop_scope="class")
class TestWhileStreamsRun:
    """Five streams a second, none of which is sent twice, from the first test to the last; what follows is done to the
    deployment meanwhile, and every stream has all of its tokens."""

    async def replaced(self, deployment: Deployment, seen: Seen, service: str, *command: str) -> None:
        """Runs a command that replaces a service's container while streams are under way; nobody may notice, and
        requests are handed over afterwards."""
        loop = asyncio.get_running_loop()
        before = await deployment.only(service)
        errors, whole = len(seen.errors), seen.whole
        await seen.running(RATE)
        began = loop.time()
        await run(*command, env={**deployment.env, "COMPOSE": deployment.env["PDSERVE_COMPOSE"]}, timeout=180)
        took = loop.time() - began
        await seen.through(RATE)  # on the new one too
        wrong, whole = seen.errors[errors:], seen.whole - whole
        print(f"compose: {whole} streams, {len(wrong)} errors while {service} was replaced in {took:.1f} s")
        assert not wrong, "\n".join(wrong[:5])
        assert whole >= 2 * RATE  # those that were under way before, and that began after
        after = await deployment.only(service)
        assert after["Id"] != before["Id"]
        for mode in MODES:
            await answer_over_grpc(deployment, mode)

    @pytest.mark.parametrize("service", ["decode", "prefill", "kvd"])
    async def test_a_service_is_replaced_and_no_stream_notices(
        self, deployment: Deployment, seen: Seen, service: str
    ) -> None:
        """roll.sh replaces the service's container. Afterwards there are as many containers as before, and a request
        is handed over."""
        await self.replaced(deployment, seen, service, str(COMPOSE / "roll.sh"), service, *deployment.files)

    @pytest.mark.parametrize("service", ["decode", "prefill"])
    async def test_the_only_engine_is_recreated_and_no_stream_notices(
        self, deployment: Deployment, seen: Seen, service: str
    ) -> None:
        """`up -d --no-deps` on the one engine of its kind, which stops it before it starts the next: what runs ends
        well, and what comes meanwhile is held until the next is there."""
        up = ("up", "--detach", "--no-deps", "--force-recreate", "--wait", "--no-build", service)
        await self.replaced(deployment, seen, service, deployment.env["PDSERVE_COMPOSE"], *deployment.files, *up)


async def test_up_again_changes_nothing(deployment: Deployment) -> None:
    """After all of it the deployment is as its file says: `up` finds nothing to do."""

    async def ids() -> dict[str, list[str]]:
        found = await deployment.containers()
        return {service: [container["Id"] for container in found[service]] for service in SERVICES}

    before = await ids()
    await deployment.compose("up", "--detach", "--wait", "--no-build")
    assert await ids() == before


async def test_scale_has_more_engines_of_a_kind(deployment: Deployment) -> None:
    """With scale.yaml behind the others two engines of each kind are healthy, and the proxy routes to all four."""
    await deployment.compose("-f", str(COMPOSE / "scale.yaml"), "up", "--detach", "--wait", "--no-build")
    async with AsyncClient(f"127.0.0.1:{deployment.grpc}") as client:
        engines = (await client.topology()).engines
    ready = sorted(engine.role for engine in engines if engine.state == "ready" and not engine.excluded_because)
    assert ready == ["decode", "decode", "prefill", "prefill"]


async def test_a_proxy_without_a_pair_is_not_ready(deployment: Deployment) -> None:
    """The proxy's health follows its engines: with one kind alone both of its faces say no, and HTTP why; when the
    other is back they say yes."""
    probe = ("exec", "-T", "proxy", "python3", "-I", "-S", "/opt/pdserve-health.py")
    http, grpc = (*probe, "http://127.0.0.1:8000/health"), (*probe, "127.0.0.1:50050")
    await asyncio.gather(*(deployment.compose(*words) for words in (http, grpc)))
    await deployment.compose("stop", "decode")
    with pytest.raises(CommandFailed, match=r"0 decode.*NO_ENGINES"):
        await deployment.compose(*http)
    with pytest.raises(CommandFailed, match="not serving"):
        await deployment.compose(*grpc)
    await deployment.compose("start", "decode")
    async with asyncio.timeout(30):
        for words in (http, grpc):
            while True:
                try:
                    await deployment.compose(*words)
                    break
                except CommandFailed:  # it has not registered yet
                    await asyncio.sleep(0.25)


async def test_down_leaves_nothing(deployment: Deployment) -> None:
    """Containers, networks and volumes are gone, and no stop took its whole grace."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await deployment.down()
    assert loop.time() - began < 20
    assert await deployment.left() == []
    assert not is_mounted(f"{PROJECT}_sockets")
