"""two-node.yaml, run: two projects on one engine, each on a network of its own, stand for two nodes.

Real: the image with nixl, the certificates of certs.sh, the published ports through which the proxy reaches the other
node's engine, the daemons' TLS, and the KV, which crosses by TCP. Not real: two hosts. A node's address is that of its
network's gateway here, and both kvds are in the one host's network.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from pdserve.client import AsyncClient, Retry
from tests.compose.deployment import COMPOSE, NO_JAEGER, Deployment, run

pytestmark = pytest.mark.timeout(600)
MODES = ("read", "write")
ADDRESSES = ("10.88.1.1", "10.88.2.1")
OWN_NETWORK = Path(__file__).with_name("own-network.yaml")
SERVICES = (("kvd", "prefill", "jaeger", "proxy"), ("kvd", "decode"))


@dataclass
class Nodes:
    """Two deployments; the first one has the proxy."""

    a: Deployment
    b: Deployment

    @property
    def both(self) -> tuple[Deployment, Deployment]:
        """In this order."""
        return self.a, self.b

    async def certified(self, folder: Path) -> None:
        """Gives each node what its kvd shows the other, as docs/deploy.md says."""
        await run(str(COMPOSE / "certs.sh"), str(folder), *ADDRESSES, env=self.a.env)
        for node, address in zip(self.both, ADDRESSES, strict=True):
            given = {"CERT": f"{address}.pem", "KEY": f"{address}.key", "CA": "ca.pem"}
            for kind, name in given.items():
                node.env[f"PDSERVE_PEER_{kind}"] = str(folder / name)
                owner = f"{node.env['PDSERVE_UID']}:{node.env['PDSERVE_GID']}"
                await run("chown", owner, str(folder / name), env=node.env)


@pytest.fixture(scope="module")
def nodes(compose: Path) -> Iterator[Nodes]:
    """Nothing runs yet; what runs at the end is taken down."""
    made: list[Deployment] = []
    with tempfile.TemporaryDirectory(prefix="pdserve-key-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for number, address in enumerate(ADDRESSES):
            (folder / address).mkdir()
            files = (COMPOSE / "two-node.yaml", NO_JAEGER, OWN_NETWORK)
            node = Deployment.make(folder / address, f"pdserve-test-{'ab'[number]}", files)
            node.env |= {
                "PDSERVE_COMPOSE": str(compose),
                "PDSERVE_IMAGE": "pdserve-nixl:test",
                "PDSERVE_NODE_ADDRESS": address,
                "PDSERVE_PROXY_ADDRESS": f"{ADDRESSES[0]}:50051",
                "PDSERVE_TEST_SUBNET": f"{address.rpartition('.')[0]}.0/24",
                # In one host's network UCX would go by its memory.
                "PDSERVE_KVD_ARGS": "--nixl-tls tcp",
            }
            made.append(node)
        nodes = Nodes(*made)
        asyncio.run(nodes.certified(folder / "peers"))
        try:
            yield nodes
        finally:
            for node in nodes.both:
                asyncio.run(node.down())


async def test_the_image_with_nixl_is_built_without_a_network(nodes: Nodes) -> None:
    """A target of its own: what it adds does not come into the image that needs none."""
    await nodes.a.compose("build", "kvd", timeout=300)
    names = (nodes.a.env["PDSERVE_BASE"], "pdserve-nixl:test")
    base, image = json.loads(await nodes.a.docker("inspect", *names))
    print(f"compose: the image with nixl adds {(image['Size'] - base['Size']) / 1e6:.0f} MB")
    # Neither torch, which nixl's wheel asks for, nor its other program.
    look = "import importlib.util as u; print([n for n in ('nixl_cu12', 'nixl_ep_cu12', 'torch') if u.find_spec(n)])"
    told = await nodes.a.docker("run", "--rm", "--network=none", "pdserve-nixl:test", "python", "-c", look)
    assert told.strip() == "['nixl_cu12']"


async def test_both_nodes_come_up(nodes: Nodes) -> None:
    """The second node first, then the one with the proxy, which is ready once a request could be placed: each
    `up --wait` returns, and every service is healthy."""
    for node, services in reversed(list(zip(nodes.both, SERVICES, strict=True))):
        await node.compose("up", "--detach", "--wait", "--no-build", *services, timeout=120)
        await node.healthy(*services)


@pytest.mark.parametrize("mode", MODES)
async def test_kv_crosses_the_nodes(nodes: Nodes, mode: str) -> None:
    """READ and WRITE over gRPC and HTTP: computed on one node, answered on the other, and nixl carried the KV. Engines
    check every byte of it."""
    async with AsyncClient(f"127.0.0.1:{nodes.a.grpc}", retry=Retry(attempts=1)) as client:
        for number in range(3):
            asked = f"{mode} {number} " * 40
            done = await client.generate(asked, max_tokens=8, mode="write" if mode == "write" else "read")
            assert done.usage.completion_tokens == 8
            assert (done.fallbacks, done.recomputed_tokens) == (0, 0)
            assert done.transfer is not None
            assert done.transfer.transport == "nixl"
            assert done.transfer.kv_bytes > 0
        addresses = {engine.role: engine.address for engine in (await client.topology()).engines}
    assert addresses == {"prefill": f"{ADDRESSES[0]}:9001", "decode": f"{ADDRESSES[1]}:9002"}
    ask = {"model": "sim", "prompt": f"{mode} " * 40, "max_tokens": 8, "pdserve": {"mode": mode}}
    url = f"http://127.0.0.1:{nodes.a.http}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=ask) as response:
        said = await response.json()
    assert response.status == 200, said
    assert (said["pdserve"]["mode"], said["pdserve"]["transfer"]["transport"]) == (mode, "nixl")


async def test_each_kvd_shows_the_other(nodes: Nodes) -> None:
    """`pdserve kvd describe` on either node has the other's address, and an open link."""
    for node, other in zip(nodes.both, reversed(ADDRESSES), strict=True):
        words = ("exec", "-T", "kvd", "pdserve", "kvd", "describe", "--state-dir", "/run/pdserve")
        told = await node.compose(*words)
        assert f"{other}:50052" in told, told
        assert "open" in told, told


async def test_down_leaves_nothing_on_either(nodes: Nodes) -> None:
    """Containers, networks and volumes are gone."""
    for node in nodes.both:
        await node.down()
        assert await node.left() == []
