"""vllm.yaml, run by hand (`make test-compose-vllm`): vLLM on CPU in containers, on a tiny model with random weights.

Its image takes minutes to build, so the other tests do not wait for it. The wheels are lent to the build's context for
as long as it takes.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from pdserve.client import AsyncClient, Retry
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from tests.compose.deployment import COMPOSE, NO_JAEGER, CommandFailed, Deployment, deployed
from tests.compose.prepare import WHEELS_VLLM

pytestmark = pytest.mark.timeout(2400)
MODES = ("read", "write")
LENT = COMPOSE / "wheels-vllm"
POOL = "--block-size 32 --max-model-len 512 --kv-cache-memory-bytes 4194304"
SERVICES = ("kvd", "prefill", "decode", "proxy")


@pytest.fixture(scope="module")
def deployment(compose: Path) -> Iterator[Deployment]:
    """Nothing runs yet; what runs at the end is taken down."""
    with deployed(compose, "pdserve-test-vllm", (COMPOSE / "vllm.yaml", NO_JAEGER)) as made:
        models = made.folder / "models"
        tiny_llama(models / "model", TinyShape(max_model_len=512))
        for path in (models, *models.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        made.env |= {
            "PDSERVE_IMAGE": "pdserve-vllm:test",
            "PDSERVE_WHEELS": str(LENT.relative_to(COMPOSE.parents[1])),
            "PDSERVE_MODELS": str(models),
            "PDSERVE_MODEL_NAME": "model",
            "PDSERVE_ENGINE_ARGS": "",
            "PDSERVE_HEALTH_INTERVAL": "5s",  # as for operators: checks cost time that loading the model needs
            "PDSERVE_PREFILL_VLLM_ARGS": POOL,
            "PDSERVE_DECODE_VLLM_ARGS": POOL,
        }
        yield made


async def test_the_image_is_built_without_a_network(deployment: Deployment) -> None:
    """From the wheel folder, on the base of the other images."""
    WHEELS_VLLM.rename(LENT)
    try:
        await deployment.compose("build", "kvd", timeout=1800)
    finally:
        LENT.rename(WHEELS_VLLM)
    names = (deployment.env["PDSERVE_BASE"], "pdserve-vllm:test")
    base, image = json.loads(await deployment.docker("inspect", *names))
    print(f"compose: the image with vLLM adds {(image['Size'] - base['Size']) / 1e6:.0f} MB")


async def test_up_waits_for_vllm(deployment: Deployment) -> None:
    """`up --wait` returns when both engines have loaded the model."""
    began = asyncio.get_running_loop().time()
    try:
        await deployment.compose("up", "--detach", "--wait", "--no-build", timeout=600)
    except (CommandFailed, TimeoutError):
        print(await deployment.compose("logs", "--no-color", "--tail", "60", "prefill", "decode", "proxy"))
        raise
    print(f"compose: vLLM was up after {asyncio.get_running_loop().time() - began:.0f} s")
    await deployment.healthy(*SERVICES)


async def test_read_and_write_over_both_faces(deployment: Deployment) -> None:
    """Greedy answers of READ and WRITE are the same, over gRPC and HTTP, and the KV went through kvd's memory."""
    texts: set[str] = set()
    prompt = "block " * 60
    async with AsyncClient(f"127.0.0.1:{deployment.grpc}", retry=Retry(attempts=1)) as client:
        for mode in MODES:
            done = await client.generate(
                prompt, max_tokens=8, temperature=0.0, mode="write" if mode == "write" else "read"
            )
            assert done.transfer is not None
            assert (done.mode, done.transfer.transport) == (mode, "shm")
            assert (done.fallbacks, done.recomputed_tokens) == (0, 0)
            texts.add(done.text)
    url = f"http://127.0.0.1:{deployment.http}/v1/completions"
    for mode in MODES:
        ask = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "pdserve": {"mode": mode}}
        async with aiohttp.ClientSession() as session, session.post(url, json=ask) as response:
            said = await response.json()
        assert response.status == 200, said
        texts.add(said["choices"][0]["text"])
    assert len(texts) == 1, texts


async def test_down_leaves_nothing(deployment: Deployment) -> None:
    """Containers, networks and volumes are gone."""
    await deployment.down()
    assert await deployment.left() == []
