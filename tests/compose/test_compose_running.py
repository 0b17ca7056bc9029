"""A deployment in a real engine, from `build` to `down -v`; the tests are its life in order, and share it.

Real: the engine, the images, every container, network, volume and signal. Not real: the model (sim engines) and Jaeger,
for whose image our own trace store stands in; the base image is made from Debian's packages.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from pdserve.client import AsyncClient, NoEngines, Retry
from tests.compose.deployment import COMPOSE, SERVICES, CommandFailed, Deployment, is_mounted, run
from tests.compose.load import streams

pytestmark = pytest.mark.timeout(900)
MODES = ("read", "write")
MOST_ADDED = 120e6
"""Bytes that an image may have more than its base."""
RATE = 5.0
"""Streams a second while services are replaced."""


@pytest.fixture(scope="module")
def deployment(compose: Path) -> Iterator[Deployment]:
    """Nothing runs yet; what runs at the end is taken down."""
    with tempfile.TemporaryDirectory(prefix="pdserve-key-") as folder:
        Path(folder).chmod(0o755)
        made = Deployment.make(Path(folder))
        made.env["PDSERVE_COMPOSE"] = str(compose)
        asyncio.run(made.down())
        try:
            yield made
        finally:
            asyncio.run(made.down())


async def answer_over_grpc(deployment: Deployment, mode: str) -> str:
    """Asks for an answer and checks it; its trace id."""
    async with AsyncClient(f"127.0.0.1:{deployment.grpc}", retry=Retry(attempts=1)) as client:
        done = await client.generate("hello " * 40, max_tokens=8, mode="write" if mode == "write" else "read")
    assert done.usage.completion_tokens == 8
    assert done.mode == mode
    assert done.transfer is not None, "the prompt's KV was handed over"
    assert done.transfer.transport == "shm"
    assert (done.fallbacks, done.recomputed_tokens) == (0, 0)
    return done.trace_id


async def answer_over_http(deployment: Deployment, mode: str) -> None:
    """The same with OpenAI's API."""
    ask = {"model": "sim", "prompt": "hello " * 40, "max_tokens": 8, "pdserve": {"mode": mode}}
    url = f"http://127.0.0.1:{deployment.http}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=ask) as response:
        said = await response.json()
    assert response.status == 200, said
    assert said["usage"]["completion_tokens"] == 8
    assert (said["pdserve"]["mode"], said["pdserve"]["transfer"]["transport"]) == (mode, "shm")


async def test_images_are_built_without_a_network(deployment: Deployment) -> None:
    """From the wheel folder, on a base that no registry gave, with the build's network cut off."""
    await deployment.compose("--profile", "bench", "build", timeout=600)


async def test_the_image_is_small_and_says_what_is_in_it(deployment: Deployment) -> None:
    """At most 120 MB more than its base; labelled; with a bill of materials; not root's."""
    names = (deployment.env["PDSERVE_BASE"], "pdserve:test", "pdserve-bench:test")
    base, image, bench = json.loads(await deployment.docker("inspect", *names))
    added, with_bench = (one["Size"] - base["Size"] for one in (image, bench))
    print(f"compose: the image adds {added / 1e6:.0f} MB, with the bench {with_bench / 1e6:.0f} MB")
    assert added < MOST_ADDED
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == deployment.env["PDSERVE_BASE"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image["Config"]["User"] == "10001:10001"
    told = await deployment.docker("run", "--rm", "--network=none", "pdserve:test", "cat", "/opt/pdserve/sbom.cdx.json")
    holds = {component["name"] for component in json.loads(told)["components"]}
    assert {"pdserve", "grpcio", "numpy", "tokenizers"} <= holds
    assert not {"torch", "vllm", "huggingface-hub", "pip"} & holds


async def test_what_goes_on_a_vendors_image_leaves_it_alone(deployment: Deployment, tmp_path: Path) -> None:
    """On an image that has a vLLM, and grpcio at its own version, only what is missing is added, beside it."""
    # A vendor's image as far as pip can tell: its distributions, where its python3 looks.
    (tmp_path / "Dockerfile").write_text(
        f"FROM {deployment.env['PDSERVE_BASE']}\n"
        "COPY site/ /usr/local/lib/python3.11/dist-packages/\n"
        "COPY --from=pdserve:test /opt/pdserve/lib/python3.11/site-packages/grpc/ "
        "/usr/local/lib/python3.11/dist-packages/grpc/\n"
        "RUN python3 -c 'import venv' && python3 -m venv /opt/tools && ln -s /opt/tools/lib/python3*/site-packages/pip "
        "/usr/local/lib/python3.11/dist-packages/pip\n"
    )
    for name, version in (("vllm", "0.32.0"), ("grpcio", "1.85.1"), ("huggingface_hub", "2.4.0")):
        folder = tmp_path / "site" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text("")
    (tmp_path / "site" / "vllm.py").write_text("")
    await deployment.docker("build", "--network=none", "-t", "pdserve-vendor:test", str(tmp_path), timeout=120)
    said = await run(
        "docker", "build", "--network=none", "-f", str(COMPOSE / "Dockerfile.vendor"),
        "--build-arg", "BASE=pdserve-vendor:test", "-t", "pdserve-gpu:test", ".",
        env=deployment.env, timeout=300,
    )  # fmt: skip
    assert "added beside the image's packages" in said
    look = (
        "import importlib.metadata as m, vllm, grpc, pdserve.rpc.errors;"
        "print(m.version('vllm'), m.version('grpcio'), vllm.__file__, grpc.__file__)"
    )
    told = await deployment.docker("run", "--rm", "--network=none", "pdserve-gpu:test", "python", "-c", look)
    theirs = "/usr/local/lib/python3.11/dist-packages"
    assert told.split() == ["0.32.0", "1.85.1", f"{theirs}/vllm.py", f"{theirs}/grpc/__init__.py"]


async def test_up_waits_until_a_request_can_be_answered(deployment: Deployment) -> None:
    """`up --wait` returns when every service is healthy, and then the first request is answered."""
    await deployment.compose("up", "--detach", "--wait", "--no-build", timeout=120)
    for service in SERVICES:
        (container,) = await deployment.inspect(service)
        assert container["State"]["Health"]["Status"] == "healthy", service
    await answer_over_grpc(deployment, "read")


async def test_containers_may_do_as_little_as_the_file_says(deployment: Deployment) -> None:
    """The engine has taken all of it: no root, no capability, no file that can be written."""
    for service in ("kvd", "prefill", "decode", "proxy"):
        (container,) = await deployment.inspect(service)
        host = container["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Init"]) == (True, ["ALL"], True), service
        probe = "import os; assert os.getuid() != 0; open('/opt/x', 'w')"
        with pytest.raises(CommandFailed, match="Read-only file system"):
            await deployment.compose("exec", "-T", service, "python", "-c", probe)
        capabilities = await deployment.compose("exec", "-T", service, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in capabilities, service


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
    ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    for service, port in (("proxy", 8000), ("kvd", 9101), ("prefill", 9101), ("decode", 9101)):
        url = f"http://{service}:{port}/metrics"
        told = await deployment.compose("exec", "-T", "jaeger", "python", "-c", ask, url)
        assert "pdserve_build_info" in told, service


async def test_the_bench_runs_beside_it(deployment: Deployment) -> None:
    """Profile bench offers its load to the proxy and finds every request answered."""
    load = "--input-len 64 --output-len 8 --rate 10 --requests 20"
    words = ("--profile", "bench", "run", "--rm", "--no-deps", "-T", "bench")
    told = await deployment.compose(*words, "pdserve", "bench", "--target", "proxy:50050", *load.split(), timeout=120)
    assert "20" in told


@pytest.mark.parametrize("service", SERVICES)
async def test_a_killed_service_comes_back(deployment: Deployment, service: str) -> None:
    """After SIGKILL the engine starts it again, the others find it, and requests are answered as before."""
    (before,) = await deployment.inspect(service)
    await deployment.kill(service)
    await deployment.healthy_again(service, before)
    (proxy,) = await deployment.inspect("proxy")
    async with asyncio.timeout(30):
        while proxy["State"]["Health"]["Status"] != "healthy":
            await asyncio.sleep(0.25)
            (proxy,) = await deployment.inspect("proxy")
        while True:
            try:
                await answer_over_grpc(deployment, "read")
                break
            except NoEngines:  # the beat that says so is at most a second away
                await asyncio.sleep(0.25)
    for mode in MODES:
        await answer_over_grpc(deployment, mode)
        await answer_over_http(deployment, mode)


@pytest.mark.parametrize("service", ["decode", "prefill", "kvd"])
async def test_a_service_is_replaced_and_no_stream_notices(deployment: Deployment, service: str) -> None:
    """roll.sh replaces the service's container under five streams a second, none of which is sent twice: every one has
    all of its tokens. Afterwards there are as many containers as before, and a request is handed over."""
    (before,) = await deployment.inspect(service)
    async with streams(deployment.grpc, deployment.http, RATE) as seen:
        await asyncio.sleep(2)  # streams are under way
        env = {**deployment.env, "COMPOSE": deployment.env["PDSERVE_COMPOSE"]}
        await run(str(COMPOSE / "roll.sh"), service, *deployment.files, env=env, timeout=180)
        await asyncio.sleep(2)  # and begin on the new one
    print(f"compose: {seen.whole} streams while {service} was replaced, {len(seen.errors)} errors")
    assert not seen.errors, "\n".join(seen.errors[:5])
    assert seen.whole > RATE * 6
    (after,) = await deployment.inspect(service)
    assert after["Id"] != before["Id"]
    for mode in MODES:
        await answer_over_grpc(deployment, mode)


async def test_up_again_changes_nothing(deployment: Deployment) -> None:
    """After all of it the deployment is as its file says: `up` finds nothing to do."""
    before = [(await deployment.inspect(service))[0]["Id"] for service in SERVICES]
    await deployment.compose("up", "--detach", "--wait", "--no-build")
    assert [(await deployment.inspect(service))[0]["Id"] for service in SERVICES] == before


async def test_scale_has_more_engines_of_a_kind(deployment: Deployment) -> None:
    """With scale.yaml behind the others two engines of each kind are healthy, and the proxy routes to all four."""
    await deployment.compose("-f", str(COMPOSE / "scale.yaml"), "up", "--detach", "--wait", "--no-build")
    async with AsyncClient(f"127.0.0.1:{deployment.grpc}") as client:
        engines = (await client.topology()).engines
    ready = sorted(engine.role for engine in engines if engine.state == "ready" and not engine.excluded_because)
    assert ready == ["decode", "decode", "prefill", "prefill"]


async def test_a_proxy_without_an_engine_is_not_ready(deployment: Deployment) -> None:
    """The proxy's health follows its engines: with none of them it says no, and why. One kind alone is enough."""
    await deployment.compose("stop", "prefill", "decode")
    probe = ("exec", "-T", "proxy", "python3", "-I", "-S", "/opt/pdserve-health.py", "http://127.0.0.1:8000/health")
    with pytest.raises(CommandFailed, match="NO_ENGINES"):
        await deployment.compose(*probe)
    await deployment.compose("start", "prefill", "decode")


async def test_down_leaves_nothing(deployment: Deployment) -> None:
    """Containers, networks and volumes are gone, and no stop took its whole grace."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await deployment.down()
    assert loop.time() - began < 20
    assert await deployment.left() == []
    assert not is_mounted("pdserve-test_sockets")
