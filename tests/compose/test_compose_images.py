"""The images: how large they are, what is in them, and what one on a vendor's image leaves alone."""

import json
import os
from pathlib import Path

import pytest

from tests.compose.deployment import COMPOSE, run

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("images")]
MOST_ADDED = 120e6
"""Bytes that an image may have more than its base."""


async def docker(*words: str, timeout: float = 60.0) -> str:
    """`docker ...`."""
    return await run("docker", *words, env=dict(os.environ), timeout=timeout)


async def test_images_are_built_without_a_network() -> None:
    """From the wheel folder, on a base that no registry gave, with the build's network cut off: both are there."""
    for name in ("pdserve:test", "pdserve-bench:test"):
        assert "sha256:" in await docker("image", "inspect", "--format", "{{.Id}}", name)


async def test_the_image_is_small_and_says_what_is_in_it() -> None:
    """At most 120 MB more than its base; labelled; with a bill of materials; not root's."""
    names = (os.environ["PDSERVE_BASE"], "pdserve:test", "pdserve-bench:test")
    base, image, bench = json.loads(await docker("inspect", *names))
    added, with_bench = (one["Size"] - base["Size"] for one in (image, bench))
    print(f"compose: the image adds {added / 1e6:.0f} MB, with the bench {with_bench / 1e6:.0f} MB")
    assert added < MOST_ADDED
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == os.environ["PDSERVE_BASE"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image["Config"]["User"] == "10001:10001"
    told = await docker("run", "--rm", "--network=none", "pdserve:test", "cat", "/opt/pdserve/sbom.cdx.json")
    holds = {component["name"] for component in json.loads(told)["components"]}
    assert {"pdserve", "grpcio", "numpy", "tokenizers"} <= holds
    assert not {"torch", "vllm", "huggingface-hub", "pip"} & holds


async def test_what_goes_on_a_vendors_image_leaves_it_alone(tmp_path: Path) -> None:
    """On an image that has a vLLM, and grpcio at its own version, only what is missing is added, beside it."""
    # A vendor's image as far as pip can tell: its distributions, where its python3 looks.
    (tmp_path / "Dockerfile").write_text(
        f"FROM {os.environ['PDSERVE_BASE']}\n"
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
    await docker("build", "--network=none", "-t", "pdserve-vendor:test", str(tmp_path), timeout=120)
    await docker(
        "build", "--network=none", "-f", str(COMPOSE / "Dockerfile.vendor"),
        "--build-arg", "BASE=pdserve-vendor:test", "-t", "pdserve-gpu:test", ".",
        timeout=300,
    )  # fmt: skip
    look = (
        "import importlib.metadata as m, sysconfig, vllm, grpc, pdserve.rpc.errors;"
        "print(m.version('vllm'), m.version('grpcio'), vllm.__file__, grpc.__file__);"
        "added = m.distributions(path=[sysconfig.get_path('purelib')]);"
        "print(*(one.metadata['Name'].lower().replace('_', '-') for one in added))"
    )
    told = await docker("run", "--rm", "--network=none", "pdserve-gpu:test", "python", "-c", look)
    seen, added = (line.split() for line in told.splitlines())
    theirs = "/usr/local/lib/python3.11/dist-packages"
    assert seen == ["0.32.0", "1.85.1", f"{theirs}/vllm.py", f"{theirs}/grpc/__init__.py"]
    assert {"pdserve", "numpy"} <= set(added)
    assert not {"vllm", "grpcio", "huggingface-hub", "pip"} & set(added)
